"""State of a member: the stage and its engines, optimizer state that changes owners, versions on
disk. Never: a decision about the epoch."""
