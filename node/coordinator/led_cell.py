"""The cell that this peer leads, as rounds between cells see it. Enters: the leader, the plan in
force. Leaves: facts about the cell. Never: a partner."""

from node.consensus.rules import ChangeStatus, Rules
from node.coordinator.service import Training
from node.core.ids import CellId, PeerId
from node.core.journey import Plan
from node.epoch import events as ev


class LedCell:
    """The port of :class:`node.outer.service.CellMeetings`."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.me: PeerId = training.kit.me
        self.stage: int = training.kit.stage

    @property
    def cell(self) -> CellId:
        """The cell of this peer."""
        return self._training.cell

    @property
    def standing(self) -> ChangeStatus:
        """The owner's changes, as this peer knows them."""
        return self._training.admission.changes

    @property
    def leads(self) -> bool:
        """True while this peer leads the cell."""
        return self._training.leader is not None

    @property
    def finished(self) -> bool:
        """True if the run is complete."""
        return self._training.following.finished.is_set()

    @property
    def plan(self) -> Plan | None:
        """The plan in force, of the cell that this peer leads; None if it leads none, or has made
        no plan for it yet."""
        plan = self._training.kit.work.plan
        if not self.leads or plan is None or plan.cell_id != self.cell:
            return None
        return plan

    @property
    def window(self) -> int:
        """Number of the window whose round has not ended, 0 for none."""
        leader = self._training.leader
        if leader is None:
            return 0
        return leader.planning.windows.number()

    @property
    def anchor(self) -> str:
        """64 hex digits for the anchors of all stages; empty if a stage has none."""
        leader = self._training.leader
        if leader is None:
            return ""
        return leader.roster.anchor()

    def change(self, text: str) -> Rules:
        """Take a change of the owner from another cell. Raises Refused."""
        return self._training.change(text)

    def grouped(self, group: ev.Grouped) -> None:
        """Tell the leader which cells were found."""
        self._training.leading.lead(group)
