import re

import pytest
import segno

from node.control.qr import BORDERS, lines
from node.core.errors import UsageFault

INVITE = "tutti2" + "abcdefgh234567" * 14


def modules(drawn: list[str], *, halves: bool) -> list[list[bool]]:
    """The dark modules of a drawing, its border included."""
    if not halves:
        return [[cell == "  " for cell in re.findall("..", row)] for row in drawn]
    upper = [[c not in "█▀" for c in row] for row in drawn]
    lower = [[c not in "█▄" for c in row] for row in drawn]
    return [row for pair in zip(upper, lower, strict=True) for row in pair]


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("width", [80, 200])
def test_the_drawing_is_the_code(halves, width):
    drawn = lines(INVITE, width * (1 if halves else 2), halves=halves, colour=False)
    code = segno.make(INVITE.upper(), error="l", micro=False, boost_error=False)
    wanted = [[bool(dark) for dark in row] for row in code.matrix_iter(border=4)]
    assert modules(drawn, halves=halves)[: len(wanted)] == wanted
    assert code.mode == "alphanumeric", "in capitals, for a smaller code"


def test_a_narrow_terminal_gets_a_narrow_border_and_then_the_truth():
    side = segno.make(INVITE.upper(), error="l", boost_error=False).symbol_size(border=0)[0]
    for border in BORDERS:
        drawn = lines(INVITE, side + 2 * border, halves=True, colour=False)
        assert len(drawn[0]) == side + 2 * border
    with pytest.raises(UsageFault, match=f"{side + 2} columns wide, this terminal {side}"):
        lines(INVITE, side, halves=True, colour=False)


def test_colours_are_set_and_taken_back_in_every_line():
    for line in lines(INVITE, 80, halves=True, colour=True):
        assert line.startswith("\x1b[97;40m")
        assert line.endswith("\x1b[0m")
