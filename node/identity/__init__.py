"""Who is speaking: keys, signatures, invites.
Enters: key files, signed bytes.
Never: a network."""
