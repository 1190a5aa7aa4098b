"""Commands for the owner of a machine: the service, the settings file, the key, a report of a bug,
the newest version. Enters: words of the command line. Leaves: files of this user, lines, exit
codes. Never: a daemon's engine."""
