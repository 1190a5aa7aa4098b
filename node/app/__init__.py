"""The daemon put together, and the work of the commands around it: join, check, demo, export."""
