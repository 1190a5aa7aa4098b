"""What leader and members say to each other, and the rules both follow: values, messages, checks.
Never: a decision of either, a clock, a task.
"""
