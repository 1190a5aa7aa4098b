"""The full-screen monitor, a client of control.
Enters: snapshots.
Never: a daemon of its own."""
