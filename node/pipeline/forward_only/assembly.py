"""Assembly of the parts of forward-only work."""

from node.core.journey import Hop
from node.pipeline.forward_only.jobs import ForwardJobs
from node.pipeline.forward_only.onward import Onward
from node.pipeline.forward_only.quota import ForwardQuota
from node.pipeline.forward_only.reading import ForwardReading
from node.pipeline.forward_only.requests import ForwardRequests
from node.pipeline.forward_only.visits import ForwardVisits
from node.pipeline.hops.assembly import Hops
from node.pipeline.hops.ports import PipelineHost


def connect(host: PipelineHost, hops: Hops, jobs: ForwardJobs, stage: int) -> ForwardRequests:
    """Make both sides of forward-only work of the peer that hosts ``stage``."""
    machine = hops.driver.machine
    shape = hops.planned.shape
    reading = ForwardReading(hops.intake, hops.guard, hops.deadlines, shape)
    onward = Onward(host.clock, hops.calls, machine, shape, hops.sender.timing)
    visits = ForwardVisits(
        host,
        shape,
        hops.deadlines,
        jobs,
        ForwardQuota(machine, hops.stash, hops.keeper),
        reading=reading,
        onward=onward,
        notes=hops.notes,
    )
    return ForwardRequests(
        Hop(stage, host.me),
        machine,
        shape,
        hops.deadlines,
        jobs,
        reading=reading,
        onward=onward,
        visits=visits,
    )
