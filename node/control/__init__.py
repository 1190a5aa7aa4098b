"""The operator's window: the daemon's answers to questions.
Enters: commands, questions.
Never: training decisions."""
