"""The daemon put together, and what the commands around it do: join, check, demo, export."""
