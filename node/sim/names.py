"""The scenarios and averaging strategies that can be simulated, with one line about each. Imports
nothing: the command line lists them in its help."""

SCENARIOS: dict[str, str] = {
    "quiet": "nothing goes wrong",
    "kill": "one peer is killed",
    "pause": "a peer stands still for seconds (SIGSTOP, SIGCONT)",
    "partition": "the network is partitioned in two and heals",
    "one-way": "a peer is heard by nobody, or hears nobody, for a while",
    "partial-partition": "a peer and the leader cannot reach each other for a while; all others "
    "reach both",
    "slow-link": "the lines of a peer become slow",
    "slow-peer": "a peer computes slowly for a while",
    "flapping": "a peer's lines come and go",
    "loss": "the lines of a peer lose messages",
    "skew": "wall clocks run apart",
    "corrupt": "a bit of a peer's parameters flips",
    "broken-step": "an owner's optimizer gives up on a step",
    "liar": "a peer lies about its tokens, epoch, speed, digest, parts or history, or accuses "
    "others falsely",
    "silent": "a peer takes plans and does nothing in their rounds",
    "overstep": "an owner gives parameters that no step of the optimizer makes",
    "stranger": "somebody with the smallest PeerId says that it leads, that the run is over, and "
    "what else would end it",
    "mass-join": "half as many peers again come at once",
    "crowd": "half as many peers again come in one second and choose their stages",
    "mass-leave": "a third of the peers leave at once, in order",
    "mass-kill": "a quarter of the peers die at once",
    "leader-kill": "the leader is killed",
    "leader-pause": "the leader stands still for seconds",
    "each-stage": "one replica of every stage dies at once",
    "outage": "every peer of a block stage dies, and they come back from their disks",
    "restart": "the whole swarm dies and comes back from its disks",
    "stop": "peers are stopped in order, one after another, and started again",
    "stop-all": "the whole swarm is stopped in order, twice, and started again",
    "churn": "peers die and are replaced, again and again",
    "random": "a mix of everything, drawn from the seed",
}
"""Scenarios with their descriptions, in the order in which they are listed."""

AVERAGING: dict[str, str] = {
    "all-reduce": "one group; a round with an absent peer is void (published baseline)",
    "butterfly": "one group that goes on without who is absent",
    "moshpit": "a grid as full as it can be, computed from the view",
    "moshpit-fixed": "random cells, drawn once (published)",
    "moshpit-keys": "no view: groups by the last indices, as through the directory",
    "random-groups": "groups as long as the grid's first axis, drawn anew every round (published)",
    "gossip": "random pairs",
    "diloco": "deltas from a common anchor, every 50 steps, outer rate 1",
    "streaming": "diloco in two fragments, one of them a round",
    "parameter-server": "all shares with one peer",
    "sharded": "parameter server of as many shards as the grid's first axis is long",
    "stale": "parameter server without a barrier, as many pushes behind as there are peers",
    "hogwild": "no barrier, no bound, no lock",
}
"""Strategies of ``tutti simulate --averaging``."""
