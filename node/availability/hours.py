"""Hours of the day at which a machine is open. Pure."""

import re
from dataclasses import dataclass

from node.core.errors import UsageFault

DAY = 24 * 60
"""Minutes of a day."""
_SPAN = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")
_STEP = 'write such as "22-07", "22:30-07:15" or "22-07,12-13"'


@dataclass(frozen=True, slots=True)
class Hours:
    """Spans of a day as (begin, end), in minutes since midnight. A span that ends before it
    begins goes over midnight. ``said``: the text that they were read from."""

    spans: tuple[tuple[int, int], ...]
    said: str

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Read "22-07" or several spans with commas between them. Raises UsageFault for anything
        else, and for a span without length."""
        spans = tuple(_span(word.strip(), text) for word in text.split(","))
        return cls(spans, text.strip())

    def open(self, minute: float) -> bool:
        """Return True if ``minute`` of the day is inside a span. Begins are inside, ends are
        not."""
        return any(_inside(minute, *span) for span in self.spans)

    def opens_in(self, minute: float) -> float:
        """Minutes from ``minute`` of the day until the next span begins."""
        return min((begin - minute) % DAY for begin, _ in self.spans)

    def next_begin(self, minute: float) -> str:
        """That time of the day, such as "22:00"."""
        begin = min(self.spans, key=lambda span: (span[0] - minute) % DAY)[0]
        return f"{begin // 60 % 24:02}:{begin % 60:02}"


def misread(text: str) -> str:
    """The fault of a text of hours, with the right form; "" for a text without a fault, and for an
    empty one."""
    try:
        if text.strip():
            Hours.parse(text)
    except UsageFault as e:
        return f"{e.what.partition(': ')[2]}; {e.next_step}"
    return ""


def _inside(minute: float, begin: int, end: int) -> bool:
    if begin < end:
        return begin <= minute < end
    return minute >= begin or minute < end


def _span(word: str, text: str) -> tuple[int, int]:
    found = _SPAN.fullmatch(word)
    if found is None:
        raise UsageFault(f'hours = "{text}": {word!r} is no span of hours', _STEP)
    begin = int(found[1]) * 60 + int(found[2] or 0)
    end = int(found[3]) * 60 + int(found[4] or 0)
    if int(found[2] or 0) > 59 or int(found[4] or 0) > 59 or begin >= DAY or end > DAY:
        raise UsageFault(f'hours = "{text}": {word!r} is no time of the day', _STEP)
    if begin == end % DAY:
        raise UsageFault(f'hours = "{text}": {word!r} begins when it ends', _STEP)
    return begin, end
