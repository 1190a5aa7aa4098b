"""Words shared by every package: ids, errors, the journey of a micro-batch, time, tasks.
Enters: nothing but the standard library.
Never: a socket, a tensor, a third-party import."""
