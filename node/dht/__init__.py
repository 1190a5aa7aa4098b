"""The swarm's directory: hivemind's DHTNode in our own loop; signed, expiring, typed records.
Enters: records.
Never: tensors."""
