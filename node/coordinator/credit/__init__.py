"""Credit for work: statements that peers sign about the routes of their micro-batches, receipts of
work that both neighbours on a route confirm, and their sums against committed tokens.
Enters: neighbours on routes of micro-batches, plans, statements of other peers.
Leaves: an account of each epoch, the file of a peer's receipts, and its audit without a daemon.
Never: a decision of the epoch."""
