"""The content of a frame: its tensor, and where documents end in it. Both are checked against the
shape that the plan implies before memory is set aside.
"""

from __future__ import annotations

from itertools import pairwise

from node.core.errors import WireError
from node.wire.tensors import TensorReader
from protos import pipeline_pb2 as pb


class FrameReader(TensorReader):
    """The tensor behind a frame's head, and the tokens in it that are the last of their document
    (``document_ends``, as :func:`node.model.documents.ends_of` has them)."""

    def __init__(
        self, head: pb.FrameHead, shape: tuple[int, ...], wire: str, masked: bool = False
    ) -> None:
        """Raises WireError for a head of another tensor, and for ends that cannot be, or that are
        there though not ``masked``."""
        super().__init__([head.tensor], [("", shape)], wire)
        most = shape[0] * shape[1] if masked else 0
        if len(head.document_ends) > most:
            raise WireError(f"{len(head.document_ends)} ends of documents, at most {most} belong")
        self.document_ends = tuple(head.document_ends)
        ends = (-1, *self.document_ends, most)
        if self.document_ends and not all(a < b for a, b in pairwise(ends)):
            raise WireError(f"ends of documents that do not rise from 0 to below {most}")
