"""Where every micro-batch goes and who shares the work.
Enters: members, speeds.
Never: I/O, torch."""
