"""Identity of speakers: keys, signatures, invites.
Enters: key files, signed bytes.
Never: a network."""
