"""A plan as consensus sees it: who proposes what to whom, without the work in it."""

from typing import Protocol

from node.core.ids import CellId, PeerId
from node.core.journey import Electorate, PlanMember, Version


class Proposal(Protocol):
    """A plan without its work, as :class:`node.core.journey.Plan` has it."""

    @property
    def term(self) -> int:
        """Number of the plan in its cell."""
        ...

    @property
    def leader(self) -> PeerId:
        """The peer that signed it."""
        ...

    @property
    def epoch(self) -> int:
        """Epoch of the base."""
        ...

    @property
    def base(self) -> Version:
        """The version it starts from."""
        ...

    @property
    def last(self) -> bool:
        """True if it ends the run."""
        ...

    @property
    def cell_id(self) -> CellId:
        """Its cell."""
        ...

    @property
    def parent(self) -> CellId:
        """The cell from which it founds another one, empty for none."""
        ...

    @property
    def electorate(self) -> Electorate:
        """Its voters."""
        ...

    @property
    def digests(self) -> dict[int, str]:
        """Digests of the base, by stage."""
        ...

    @property
    def stood(self) -> dict[int, Version]:
        """Older versions with the parameters of stages that were left out until the base."""
        ...

    def member(self, peer: PeerId) -> PlanMember | None:
        """The row of a member."""
        ...
