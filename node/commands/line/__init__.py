"""Parts that all commands share: click's commands in this program's form, options, output, starts
of a daemon, and the way from a command line to an exit code.

Words of a command line enter. No noun's own arguments or decisions do: they are in its file.
"""
