"""Receipts of a stream, which its receiver sends: ACCEPTED and then DONE or REFUSED, or a refusal
at once."""

from typing import Any

from protos import pipeline_pb2 as pb


async def say(context: Any, verdict: int, reason: str = "", waited_s: float = 0.0) -> None:
    """Send one receipt. ``waited_s``: seconds that the frame waited for a plan or for room."""
    receipt = pb.Receipt(reason=reason, waited_s=waited_s)
    receipt.verdict = verdict  # pyright: ignore[reportAttributeAccessIssue] - an enum's int
    await context.write(receipt)
