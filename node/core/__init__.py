"""Values shared by every package: ids, errors, the journey of a micro-batch, time, tasks.
Imports the standard library only.
Never: a socket, a tensor, a third-party import."""
