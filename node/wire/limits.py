"""Largest messages of peers: one row for every message that another peer sends, and one for every
field of it that repeats or is long.

Each number is the most that an honest peer sends in the largest run that the manifest's rules and
the planner allow, rounded up. `node/wire/bounds.py` applies the rows to the raw bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
PEERS = 1024
"""Peers that a message names. The directory shows 512 of a cell."""
PARTS = 20_000
"""Parameters that a message names."""
STAGES = 4097
"""The ends and the block stages of the largest manifest."""
MICRO_BATCHES = 1 << 18
"""Micro-batches that a message names: a plan of 4 MiB has fewer paths."""
RESULTS = 1024
"""Results of micro-batches that are sent in one message."""
MOST_RESULTS = 1 << 14
"""Results of micro-batches that are read from one message: earlier software of the same protocol
version sends all that it has."""
SEEN = 64
"""Neighbours in a heartbeat, each with the measurements of its connection."""
REACHABLE = 64
"""Versions that a heartbeat offers to return to, the newest ones."""
PAST = 1024
"""Versions of its history that a peer sends."""
PROOFS = 8
"""Proofs of double votes in one message, the newest ones."""
CELLS = 32
"""Cells of a group."""
CELL_STAGES = 256
"""Stages of a cell of a group."""
CELL_HOSTS = 8
"""Hosts of a stage of such a cell."""
CELL_ADDRESSES = 4
"""Addresses of a host of such a cell."""
NAME = 512
"""Bytes of one name or address in a list."""
TEXT = 4 * KIB
"""Bytes of a text, a signature or a digest that has no row of its own."""
PLAN = 4 * MIB
"""Bytes of a plan."""
WORK = 64 * KIB
"""Bytes of a statement of work: some 5 for each micro-batch of a peer in one epoch."""
SKETCHED = 512
"""Micro-batches of which a peer sends sketches with one commit."""
SKETCHES = 160 * KIB
"""Bytes of these sketches: 264 for each micro-batch, and the numbers of its neighbours."""
STOPS = 16
"""Stop texts of a request for text."""
MESSAGES = 256
"""Messages of a request's conversation."""
CELL_HOSTS_BYTES = 96 * KIB
"""Bytes of the hosts of one cell."""
UNKNOWN = 64
"""Unknown fields of one message: a newer tutti of the same protocol version may add some."""
FIELDS = 1 << 17
"""Fields of one message, with the fields of the messages inside it."""


@dataclass(frozen=True, slots=True)
class FieldLimit:
    """Bounds of one field: ``entries`` if it repeats, ``nbytes`` of one entry that has a length."""

    entries: int = 1
    nbytes: int = TEXT


_PLAN_NOTE = FieldLimit(nbytes=PLAN + 64 * KIB)
_PEERS = FieldLimit(PEERS, NAME)
_PARTS = FieldLimit(PARTS, NAME)
_TENSORS = FieldLimit(PARTS, NAME + 128)
_SHAPE = FieldLimit(8)
_PROOFS = FieldLimit(PROOFS, 2 * KIB)
_SKIPPED = FieldLimit(STAGES)

SIZES: Mapping[str, int] = {
    "v1.Ask": 16 * KIB,
    "v1.Answer": MIB,
    "v1.HandshakeFrame": 32 * KIB,
    "v1.RelayAsk": 4 * KIB,
    "v1.RelayAnswer": 4 * KIB,
    "v1.Relayed": 4 * KIB,
    "v1.PunchAsk": 4 * KIB,
    "v1.PunchAnswer": 4 * KIB,
    "v1.BypassAsk": 4 * KIB,
    "v1.BypassAnswer": 4 * KIB,
    "v1.ShareAsk": KIB,
    "v1.ShareAnswer": 4 * KIB,
    "v1.Note": PLAN + 64 * KIB,
    "v1.WorkNote": WORK,
    "v1.EpochReceipts": PLAN + 64 * KIB,
    "v1.NoteReply": 16 * KIB,
    "v1.HistoryRequest": KIB,
    "v1.HistoryReply": PLAN + 64 * KIB,
    "v1.Frame": MIB + 64 * KIB,
    "v1.Receipt": 8 * KIB,
    "v1.FetchInput": 16 * KIB,
    "v1.LostNote": 8 * KIB,
    "v1.LostReply": KIB,
    "v1.CountedNote": MIB,
    "v1.CountedReply": KIB,
    "averaging.v1.Contribution": 2 * MIB + 64 * KIB,
    "averaging.v1.Fresh": 2 * MIB + 64 * KIB,
    "v1.DescribeRequest": 2 * MIB,
    "v1.StateManifest": PLAN + 64 * KIB,
    "v1.FetchRequest": 4 * KIB,
    "v1.StateChunk": MIB + 64 * KIB,
    "v1.ListRequest": KIB,
    "v1.StateList": PLAN + 64 * KIB,
    "v1.FileRequest": KIB,
    "v1.CellsNote": CELLS * CELL_HOSTS_BYTES + 64 * KIB,
    "v1.CellsReply": CELL_HOSTS_BYTES + 8 * KIB,
    "v1.GenerateRequest": 160 * KIB,
    "v1.Piece": 80 * KIB,
    "v1.EvaluateRequest": 32 * KIB,
    "v1.Evaluated": 64 * KIB,
}
"""Bytes of each message that a peer sends by itself, by its name without ``tutti.``."""

LIMITS: Mapping[str, FieldLimit] = {
    # Notes, by their kind. A heartbeat has some 90 bytes for each of 64 neighbours, and up to 8
    # KiB of the owner's change. A result has up to 40 bytes. A round names the new owners of parts,
    # 120 bytes each, and its dropped micro-batches, 3 bytes each. A commit has a statement of work
    # and sketches.
    "v1.Note.plan": _PLAN_NOTE,
    "v1.Note.finished": FieldLimit(nbytes=MIB),
    "v1.Note.round": FieldLimit(nbytes=2 * MIB),
    "v1.Note.committed": FieldLimit(nbytes=WORK + SKETCHES + 4 * KIB),
    "v1.Note.incomplete": FieldLimit(nbytes=2 * MIB),
    "v1.Note.fault": FieldLimit(nbytes=KIB),
    "v1.Note.ready": FieldLimit(nbytes=64 * KIB),
    "v1.Note.dead": FieldLimit(nbytes=MIB),
    "v1.Note.move": FieldLimit(nbytes=KIB),
    "v1.Note.lead": FieldLimit(nbytes=KIB),
    "v1.Note.takeover": FieldLimit(nbytes=MIB),
    "v1.NoteReply.lost": FieldLimit(16, NAME),
    "v1.LackingNote.peers": FieldLimit(64, NAME),
    "v1.PlanNote.plan": FieldLimit(nbytes=PLAN),
    "v1.PlanNote.supporters": FieldLimit(PEERS, NAME),
    "v1.PlanNote.doubles": _PROOFS,
    "v1.CommittedNote.work": FieldLimit(nbytes=WORK),
    "v1.CommittedNote.sketches": FieldLimit(nbytes=SKETCHES),
    "v1.SketchesNote.indices": FieldLimit(SKETCHED),
    "v1.SketchesNote.takers": FieldLimit(SKETCHED),
    "v1.SketchesNote.givers": FieldLimit(SKETCHED),
    "v1.SketchesNote.sketches": FieldLimit(nbytes=SKETCHES),
    "v1.WorkNote.indices": FieldLimit(MOST_RESULTS),
    "v1.WorkNote.sizes": FieldLimit(MOST_RESULTS),
    "v1.WorkNote.takers": FieldLimit(MOST_RESULTS),
    "v1.WorkNote.givers": FieldLimit(MOST_RESULTS),
    "v1.WorkReceipt.work": FieldLimit(nbytes=WORK),
    "v1.ReceiptsNote.receipts": FieldLimit(PEERS, WORK + KIB),
    "v1.EpochReceipts.plan": FieldLimit(nbytes=PLAN),
    "v1.EpochReceipts.dropped": FieldLimit(MICRO_BATCHES),
    "v1.EpochReceipts.receipts": FieldLimit(PEERS, WORK + KIB),
    "v1.CertificateNote.voters": _PEERS,
    "v1.CertificateNote.ballots": FieldLimit(PEERS, NAME),
    "v1.FinishedNote.results": FieldLimit(MOST_RESULTS, 128),
    "v1.RoundNote.dead": _PEERS,
    "v1.RoundNote.owners": FieldLimit(PARTS, 2 * NAME),
    "v1.RoundNote.sources": _PEERS,
    "v1.RoundNote.dropped": FieldLimit(MICRO_BATCHES),
    "v1.IncompleteNote.holds": _PARTS,
    "v1.IncompleteNote.failed": _PEERS,
    "v1.IncompleteNote.impossible": _PEERS,
    "v1.ReadyNote.reachable": FieldLimit(REACHABLE, NAME),
    "v1.ReadyNote.seen": FieldLimit(SEEN, NAME),
    "v1.ReadyNote.change": FieldLimit(nbytes=8 * KIB),
    "v1.ReadyNote.doubles": _PROOFS,
    "v1.CostNote.ways": FieldLimit(SEEN, NAME),
    "v1.CostNote.rates": FieldLimit(SEEN, NAME),
    "v1.DeadNote.dead": _PEERS,
    "v1.TakeoverNote.dead": _PEERS,
    "v1.HistoryReply.plan": FieldLimit(nbytes=PLAN),
    "v1.HistoryReply.dropped": FieldLimit(MICRO_BATCHES),
    "v1.HistoryReply.past": FieldLimit(PAST, NAME),
    # Micro-batches. A journey names every hop; ends of documents are at most a micro-batch's
    # tokens, which the reader compares with the run's.
    "v1.Frame.head": FieldLimit(nbytes=MIB),
    "v1.Frame.chunk": FieldLimit(nbytes=MIB),
    "v1.Frame.left": FieldLimit(nbytes=64),
    "v1.FrameHead.journey": FieldLimit(STAGES + 1, NAME),
    "v1.FrameHead.document_ends": FieldLimit(MIB),
    "v1.FetchInput.skipped": _SKIPPED,
    "v1.CountedNote.indices": FieldLimit(MICRO_BATCHES),
    # Rounds and state: one head for each part.
    "v1.TensorHead.shape": _SHAPE,
    "averaging.v1.Contribution.head": FieldLimit(nbytes=MIB),
    "averaging.v1.Contribution.chunk": FieldLimit(nbytes=2 * MIB),
    "averaging.v1.ContributionHead.tensors": _TENSORS,
    "averaging.v1.Fresh.head": FieldLimit(nbytes=MIB),
    "averaging.v1.Fresh.chunk": FieldLimit(nbytes=2 * MIB),
    "averaging.v1.FreshHead.tensors": _TENSORS,
    "averaging.v1.FreshHead.made": FieldLimit(PARTS, PEERS * 64),
    "averaging.v1.Made.contributors": _PEERS,
    "v1.DescribeRequest.names": _PARTS,
    "v1.StateManifest.tensors": FieldLimit(PARTS, PLAN),
    "v1.StateTensor.hashes": FieldLimit(nbytes=PLAN),
    "v1.StateChunk.data": FieldLimit(nbytes=MIB),
    "v1.StateList.parts": FieldLimit(PARTS, NAME + 128),
    # Cells.
    "v1.CellsNote.named": FieldLimit(nbytes=CELLS * CELL_HOSTS_BYTES + 32 * KIB),
    "v1.GroupNote.members": FieldLimit(CELLS, CELL_HOSTS_BYTES + KIB),
    "v1.AcceptanceNote.hosts": FieldLimit(CELL_STAGES, CELL_HOSTS * (CELL_ADDRESSES + 1) * NAME),
    "v1.StageHosts.peers": FieldLimit(CELL_HOSTS, (CELL_ADDRESSES + 1) * NAME),
    "v1.StageHost.maddrs": FieldLimit(CELL_ADDRESSES, NAME),
    # Questions, handshakes and connections.
    "v1.AskReach.ports": FieldLimit(4),
    "v1.ManifestAnswer.toml": FieldLimit(nbytes=64 * KIB),
    "v1.PeersAnswer.peers": FieldLimit(4 * PEERS, 2 * KIB),
    "v1.PeersAnswer.invites": FieldLimit(4 * PEERS, 2 * NAME),
    "v1.ReachAnswer.open": FieldLimit(4),
    "v1.Hello.addresses": FieldLimit(8, NAME),
    "v1.Hello.mapped": FieldLimit(8, NAME),
    "v1.PunchAsk.addresses": FieldLimit(64, NAME),
    "v1.PunchAnswer.addresses": FieldLimit(64, NAME),
    "v1.BypassAsk.addresses": FieldLimit(4, NAME),
    "v1.BypassAnswer.addresses": FieldLimit(4, NAME),
    # Forward-only work for peers without the ends.
    "v1.GenerateRequest.prompt": FieldLimit(nbytes=64 * KIB),
    "v1.GenerateRequest.stop": FieldLimit(STOPS, NAME),
    "v1.GenerateRequest.messages": FieldLimit(MESSAGES, 65 * KIB),
    "v1.ChatMessage.role": FieldLimit(nbytes=NAME),
    "v1.ChatMessage.content": FieldLimit(nbytes=64 * KIB),
    "v1.Piece.text": FieldLimit(nbytes=64 * KIB),
    "v1.LeaveOut.stages": _SKIPPED,
    "v1.Missing.asked": _SKIPPED,
    "v1.Missing.dead": _SKIPPED,
}
"""Bounds of each field that repeats, or that may be longer than :data:`TEXT`."""
