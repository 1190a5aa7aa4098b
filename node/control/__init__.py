"""The operator's window: what the daemon answers when asked.
Enters: commands, questions.
Never: training decisions."""
