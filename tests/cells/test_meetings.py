"""The search of one cell for a group, as its leader begins it."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.averaging.strategies.keys import MOST_TOGETHER
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId
from node.outer.postings import CellFacts
from node.outer.service import CellMeetings
from node.telemetry.events import Journal
from tests.cells.leaders import cell_id, facts

DELTAS = OuterSettings("butterfly", "deltas", "nesterov", window_s=60.0)
SERVER = replace(DELTAS, strategy="parameter-server")
PARAMETERS = OuterSettings("butterfly", window_s=60.0)
HOGWILD = OuterSettings("hogwild", "deltas", "sgd", lr=1.0, momentum=0.0, window_s=60.0)


class Scene:
    """A leader that sees ``cells`` and finds nobody; ``asked``: (most cells of a group, whether
    there is one group only) of each search."""

    def __init__(self, settings: OuterSettings, cells: int) -> None:
        self.cells = cells
        self.asked: list[tuple[int, bool]] = []
        self.journal = Journal()
        rules = SimpleNamespace(outer=settings, revision=0)
        led: Any = SimpleNamespace(standing=SimpleNamespace(in_force=rules))
        finder: Any = SimpleNamespace(find=self.find)
        register: Any = SimpleNamespace(standing=lambda: (0, self.cells))
        clock: Any = None
        self.meetings = CellMeetings(
            finder,
            led,
            clock,
            self.journal,
            register=register,
            addresses=lambda peer: (),
            learn=lambda peer, maddrs: None,
        )

    async def find(
        self,
        about: CellFacts,
        window: int,
        keys: Sequence[str],
        most: int,
        start_wall: float,
        together: bool,
    ) -> None:
        self.asked.append((most, together))

    async def looks(self, window: int) -> None:
        about = facts(CellId(cell_id(1)))
        assert await self.meetings._partners(about, window) is None

    @property
    def warned(self) -> list[int]:
        """Numbers of cells that were said to be too many."""
        return [e.fields["cells"] for e in self.journal.recent() if e.kind == "cells-too-many"]


@pytest.mark.parametrize("settings", [DELTAS, SERVER], ids=lambda s: s.strategy)
async def test_too_many_cells_for_one_group_are_reported_once(settings: OuterSettings) -> None:
    scene = Scene(settings, MOST_TOGETHER)
    await scene.looks(1)
    assert scene.warned == []
    scene.cells = MOST_TOGETHER + 1
    await scene.looks(2)
    await scene.looks(3)
    assert scene.warned == [MOST_TOGETHER + 1]
    scene.cells = MOST_TOGETHER
    await scene.looks(4)
    scene.cells = MOST_TOGETHER + 2
    await scene.looks(5)
    assert scene.warned == [MOST_TOGETHER + 1, MOST_TOGETHER + 2]
    assert scene.asked == 5 * [(MOST_TOGETHER, True)]


@pytest.mark.parametrize("settings", [PARAMETERS, HOGWILD], ids=lambda s: s.strategy)
async def test_several_groups_are_fine_where_cells_may_differ(settings: OuterSettings) -> None:
    scene = Scene(settings, 4 * MOST_TOGETHER)
    await scene.looks(1)
    assert scene.asked == [(MOST_TOGETHER, False)]
    assert scene.warned == []
