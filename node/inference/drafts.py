"""Drafts of the next tokens of a text by prompt lookup: if the last tokens occurred earlier in the
text, the draft repeats the continuation of that occurrence. One pass over a draft checks all of its
tokens (speculative decoding, arXiv 2211.17192). Pure.

Enters: the tokens of a text so far, and how many of each draft were right. Leaves: the next draft.
Never: a logit.
"""

from collections.abc import Sequence

ALIKE = 3
"""Fewest tokens that must have stood before."""
MOST = 8
"""Most tokens of a draft. A processor takes up to twice as long for a pass over nine rows as for a
pass over one; lines with a delay, and GPUs, hardly longer."""
FIRST = 2
"""Most tokens of the first draft."""


class Drafts:
    """The drafts of one text. A draft is no longer than the tokens that stood before. It may be
    twice as long as the last one that was right, and half as long as one that was wrong from its
    first token."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """Newest index behind each run of :data:`ALIKE` tokens, the last run of the text left
        out."""
        self._read = ALIKE
        """Index of the end of the next run of ids to put into ``_after``."""
        self._most = FIRST

    def next(self, ids: Sequence[int], room: int) -> list[int]:
        """Draft of at most ``room`` tokens behind ``ids``, which begin with the ids of the call
        before; [] where their end has not stood before."""
        while self._read < len(ids):
            self._after[tuple(ids[self._read - ALIKE : self._read])] = self._read
            self._read += 1
        at = self._after.get(tuple(ids[-ALIKE:]), 0)
        if not at or len(ids) < ALIKE:
            return []
        most = min(self._most, room)
        alike = ALIKE
        while alike < most and alike < at and ids[at - alike - 1] == ids[-alike - 1]:
            alike += 1
        drafted: list[int] = []
        for index in range(at, at + min(alike, most)):
            # A text that repeats itself at once goes on into its own draft.
            beyond = index - len(ids)
            drafted.append(ids[index] if beyond < 0 else drafted[beyond])
        return drafted

    def judge(self, drafted: int, right: int) -> None:
        """Learn that the first ``right`` tokens of the last draft of ``drafted`` were right."""
        if right == drafted:
            self._most = min(MOST, max(self._most, 2 * drafted))
        elif not right:
            self._most = max(1, drafted // 2)
