"""The swarm's noticeboard: hivemind's DHTNode in our own loop; signed, expiring, typed records.
Enters: records.
Never: tensors."""
