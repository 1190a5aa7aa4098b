"""``tutti web``: a page about the run in a browser, a client of the daemon's control service.

Enters: what ``tutti status`` and ``tutti peers`` show, and the history of epochs. Leaves: one page
and a stream of changes to its document. Never: a change to the daemon.
"""
