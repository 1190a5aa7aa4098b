"""Orders of the run's owner to all of its peers: pause, resume, end. Nothing of the training and of
this machine's own pauses is known here."""
