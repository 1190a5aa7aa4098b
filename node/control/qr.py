"""An invite as a QR code of characters, to be read from the screen by a telephone's camera."""

from collections.abc import Sequence

from node.core.errors import UsageFault

BORDERS = (4, 2, 1)
"""Light modules around the code: the standard wants four, most cameras are content with one."""
LIGHT_ON_DARK = "\x1b[97;40m"
PLAIN = "\x1b[0m"
HALVES = {(1, 1): "█", (1, 0): "▀", (0, 1): "▄", (0, 0): " "}
"""Two modules above each other, 1 for a light one."""
WHOLE = {1: "##", 0: "  "}


def lines(text: str, width: int, *, halves: bool, colour: bool) -> list[str]:
    """The QR code of ``text``, light on dark, at most ``width`` columns wide. ``text`` must mean
    the same in capitals.

    ``halves``: two modules in a character, of block elements, else ASCII. ``colour``: light and
    dark are set, whatever the terminal's own colours are. Raises UsageFault where the code is too
    wide.
    """
    import segno  # which no daemon needs

    # Capitals and digits take two thirds of the modules of other text.
    code = segno.make(text.upper(), error="l", micro=False, boost_error=False)
    side = 2
    if halves:
        side = 1
    sizes = {border: code.symbol_size(border=border)[0] * side for border in BORDERS}
    border = next((b for b, columns in sizes.items() if columns <= width), None)
    if border is None:
        raise UsageFault(
            f"the QR code is {min(sizes.values())} columns wide, this terminal {width}",
            "widen the terminal or make its letters smaller, or copy the invite:  "
            "tutti swarm invite",
        )
    rows = [[1 - bool(dark) for dark in row] for row in code.matrix_iter(border=border)]
    if halves:
        drawn = _halves(rows)
    else:
        drawn = ["".join(map(WHOLE.__getitem__, row)) for row in rows]
    if colour:
        return [f"{LIGHT_ON_DARK}{row}{PLAIN}" for row in drawn]
    return drawn


def _halves(rows: Sequence[Sequence[int]]) -> list[str]:
    even = [*rows]
    if len(rows) % 2:
        even.append([0] * len(rows[0]))
    pairs = zip(even[::2], even[1::2], strict=True)
    return ["".join(HALVES[pair] for pair in zip(*two, strict=True)) for two in pairs]
