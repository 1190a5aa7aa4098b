"""Messages between leader and members, and the rules both follow: values, messages, checks. Never:
a decision of either, a clock, a task."""
