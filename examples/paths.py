"""The paths of one epoch, planned for a swarm on two sites.

Two ends peers and four peers of two block stages stand in Oslo and in Lisbon, 40 ms apart. Peer 5
is three times as slow as the others. The planner that a leader uses chooses a path for each of
eight micro-batches. With a number of moves in place of a time limit, the plan is the same on every
machine.

    python examples/paths.py
"""

from collections import Counter

from node.scheduler.planning.planner import make_plan
from node.scheduler.planning.problem import parse
from node.scheduler.planning.replay import replay

OSLO = "Oslo"
LISBON = "Lisbon"
SITES = [OSLO, LISBON, OSLO, LISBON, OSLO, LISBON]
STAGES = [[0, 1], [2, 3], [4, 5]]
"""Peers of each stage. Stage 0 is the ends."""
FORWARD_S = [0.01, 0.01, 0.05, 0.05, 0.05, 0.15]
"""Seconds of one forward pass at each peer."""
NEAR_S = 0.002
FAR_S = 0.04


def delay(a: int, b: int) -> float:
    """Seconds that a tensor takes between two peers."""
    if a == b:
        return 0.0
    return NEAR_S if SITES[a] == SITES[b] else FAR_S


def main() -> None:
    """Print every path, and the plan beside round robin."""
    peers = range(len(SITES))
    problem = parse(
        {
            "delays_s": [[delay(a, b) for b in peers] for a in peers],
            "compute_s": FORWARD_S,
            "stages": STAGES,
            "path_length": len(STAGES),
            "microbatches_per_end": 4,
        }
    )
    plan = make_plan(problem, moves=500)
    print("micro-batch  path")
    for number, route in enumerate(plan.routes):
        print(f"{number:11}  {' -> '.join(f'{peer} {SITES[peer]}' for peer in route)}")
    visits = Counter(peer for route in plan.routes for peer in route[1:])
    for stage, hosts in enumerate(STAGES[1:], 1):
        shares = ", ".join(f"peer {peer} has {visits[peer]}" for peer in hosts)
        print(f"stage {stage}: {shares}")
    turns = [
        (origin, *(hosts[number % len(hosts)] for hosts in STAGES[1:]))
        for origin in STAGES[0]
        for number in range(4)
    ]
    print(f"epoch        {plan.makespan:.3f} s planned, at least {plan.bound:.3f} s by any plan")
    print(f"round robin  {replay(problem, turns).makespan:.3f} s")


if __name__ == "__main__":
    main()
