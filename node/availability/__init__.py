"""When this machine works for the swarm, and when it is its owner's alone: commands, hours, signs
of use. Nothing of the training is known here."""
