"""Hypothesis drives the simulated swarm: kill, join, pause, cut, heal, let time pass, in any
order."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from node.sim.faults import Fault, strike
from node.sim.run import PATIENCE_S
from node.sim.setup import Setup, WorkTimes
from node.sim.swarm import SimSwarm

WHO = st.integers(0, 40)
SLOW = Setup(epochs=10_000, work=WorkTimes(ends_s=0.03, forward_s=0.1, step_s=0.03))
"""Epochs of more than a second. Faults last for seconds, and shorter epochs between them would show
nothing more."""


class AnySwarm(RuleBasedStateMachine):
    """The checkers raise inside :meth:`advance`; afterwards the swarm must go on."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.swarm = SimSwarm(SLOW, seed)
        self.swarm.world.run(4.0)

    def strike(self, kind: str, who: int, seconds: float = 0.0, size: float = 0.0) -> None:
        strike(self.swarm, Fault(0.0, kind, who, -1, seconds, size))

    @rule(
        who=WHO,
        kind=st.sampled_from(
            ["kill", "replace", "restart", "kill-leader", "broken-step", "corrupt", "leave"]
        ),
    )
    def lose(self, who: int, kind: str) -> None:
        self.strike(kind, who, 1.0)

    @rule(who=WHO)
    def join(self, who: int) -> None:
        if len(self.swarm.live()) < 14:
            self.strike("join", who)

    @rule(who=WHO, seconds=st.floats(0.2, 10.0))
    def pause(self, who: int, seconds: float) -> None:
        self.strike("pause", who, seconds)

    @rule(who=WHO, seconds=st.floats(0.2, 12.0), size=st.sampled_from([0.2, 0.5, 0.8]))
    def cut(self, who: int, seconds: float, size: float) -> None:
        self.strike("partition", who, seconds, size)

    @rule()
    def heal(self) -> None:
        self.swarm.world.run(self.swarm.world.now + 13.0)
        assert not self.swarm.links.walls

    @rule(seconds=st.floats(0.05, 5.0))
    def advance(self, seconds: float) -> None:
        self.swarm.world.run(self.swarm.world.now + seconds)

    @invariant()
    def every_stage_has_somebody(self) -> None:
        if hasattr(self, "swarm"):
            assert all(self.swarm.live(stage) for stage in range(self.swarm.setup.stages + 1))

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        world = self.swarm.world
        commits = self.swarm.watch.commits
        while self.swarm.troubles:
            world.run(world.now + 1.0)
        count = len(commits)
        until = world.now + PATIENCE_S
        while len(commits) == count and world.now < until:
            world.run(world.now + 2.0)
        chief = self.swarm.chief()
        assert len(commits) > count, (
            f"no commit: {chief and chief.leader and chief.leader.gathering.waiting}"
        )


TestAnySwarm = AnySwarm.TestCase
TestAnySwarm.settings = settings(
    max_examples=3,
    stateful_step_count=12,
    # Without Phase.explain: hypothesis would trace every line to explain a failure, at ten times
    # the test's cost.
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
