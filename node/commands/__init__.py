"""The commands of ``tutti``, one file for each noun.

Words of a command line enter; text, JSON and an exit code leave. A command reads its words, calls
the package that does the work, and prints the result. torch, hivemind and libp2p are imported only
inside the commands that need them, so that every other one answers at once.
"""
