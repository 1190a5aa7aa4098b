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
class Limit:
    """Bounds of one field: ``entries`` if it repeats, ``nbytes`` of one entry that has a length."""

    entries: int = 1
    nbytes: int = TEXT


_PLAN_NOTE = Limit(nbytes=PLAN + 64 * KIB)
_PEERS = Limit(PEERS, NAME)
_PARTS = Limit(PARTS, NAME)
_TENSORS = Limit(PARTS, NAME + 128)
_SHAPE = Limit(8)
_PROOFS = Limit(PROOFS, 2 * KIB)
_SKIPPED = Limit(STAGES)

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

LIMITS: Mapping[str, Limit] = {
    # Notes, by their kind. A heartbeat has some 90 bytes for each of 64 neighbours, and up to 8
    # KiB of the owner's change. A result has up to 40 bytes. A round names the new owners of parts,
    # 120 bytes each, and its dropped micro-batches, 3 bytes each. A commit has a statement of work
    # and sketches.
    "v1.Note.plan": _PLAN_NOTE,
    "v1.Note.finished": Limit(nbytes=MIB),
    "v1.Note.round": Limit(nbytes=2 * MIB),
    "v1.Note.committed": Limit(nbytes=WORK + SKETCHES + 4 * KIB),
    "v1.Note.incomplete": Limit(nbytes=2 * MIB),
    "v1.Note.fault": Limit(nbytes=KIB),
    "v1.Note.ready": Limit(nbytes=64 * KIB),
    "v1.Note.dead": Limit(nbytes=MIB),
    "v1.Note.move": Limit(nbytes=KIB),
    "v1.Note.lead": Limit(nbytes=KIB),
    "v1.Note.takeover": Limit(nbytes=MIB),
    "v1.NoteReply.lost": Limit(16, NAME),
    "v1.LackingNote.peers": Limit(64, NAME),
    "v1.PlanNote.plan": Limit(nbytes=PLAN),
    "v1.PlanNote.supporters": Limit(PEERS, NAME),
    "v1.PlanNote.doubles": _PROOFS,
    "v1.CommittedNote.work": Limit(nbytes=WORK),
    "v1.CommittedNote.sketches": Limit(nbytes=SKETCHES),
    "v1.SketchesNote.indices": Limit(SKETCHED),
    "v1.SketchesNote.takers": Limit(SKETCHED),
    "v1.SketchesNote.givers": Limit(SKETCHED),
    "v1.SketchesNote.sketches": Limit(nbytes=SKETCHES),
    "v1.WorkNote.indices": Limit(MOST_RESULTS),
    "v1.WorkNote.sizes": Limit(MOST_RESULTS),
    "v1.WorkNote.takers": Limit(MOST_RESULTS),
    "v1.WorkNote.givers": Limit(MOST_RESULTS),
    "v1.WorkReceipt.work": Limit(nbytes=WORK),
    "v1.ReceiptsNote.receipts": Limit(PEERS, WORK + KIB),
    "v1.EpochReceipts.plan": Limit(nbytes=PLAN),
    "v1.EpochReceipts.dropped": Limit(MICRO_BATCHES),
    "v1.EpochReceipts.receipts": Limit(PEERS, WORK + KIB),
    "v1.CertificateNote.voters": _PEERS,
    "v1.CertificateNote.ballots": Limit(PEERS, NAME),
    "v1.FinishedNote.results": Limit(MOST_RESULTS, 128),
    "v1.RoundNote.dead": _PEERS,
    "v1.RoundNote.owners": Limit(PARTS, 2 * NAME),
    "v1.RoundNote.sources": _PEERS,
    "v1.RoundNote.dropped": Limit(MICRO_BATCHES),
    "v1.IncompleteNote.holds": _PARTS,
    "v1.IncompleteNote.failed": _PEERS,
    "v1.IncompleteNote.impossible": _PEERS,
    "v1.ReadyNote.reachable": Limit(REACHABLE, NAME),
    "v1.ReadyNote.seen": Limit(SEEN, NAME),
    "v1.ReadyNote.change": Limit(nbytes=8 * KIB),
    "v1.ReadyNote.doubles": _PROOFS,
    "v1.CostNote.ways": Limit(SEEN, NAME),
    "v1.CostNote.rates": Limit(SEEN, NAME),
    "v1.DeadNote.dead": _PEERS,
    "v1.TakeoverNote.dead": _PEERS,
    "v1.HistoryReply.plan": Limit(nbytes=PLAN),
    "v1.HistoryReply.dropped": Limit(MICRO_BATCHES),
    "v1.HistoryReply.past": Limit(PAST, NAME),
    # Micro-batches. A journey names every hop; ends of documents are at most a micro-batch's
    # tokens, which the reader compares with the run's.
    "v1.Frame.head": Limit(nbytes=MIB),
    "v1.Frame.chunk": Limit(nbytes=MIB),
    "v1.Frame.left": Limit(nbytes=64),
    "v1.FrameHead.journey": Limit(STAGES + 1, NAME),
    "v1.FrameHead.document_ends": Limit(MIB),
    "v1.FetchInput.skipped": _SKIPPED,
    "v1.CountedNote.indices": Limit(MICRO_BATCHES),
    # Rounds and state: one head for each part.
    "v1.TensorHead.shape": _SHAPE,
    "averaging.v1.Contribution.head": Limit(nbytes=MIB),
    "averaging.v1.Contribution.chunk": Limit(nbytes=2 * MIB),
    "averaging.v1.ContributionHead.tensors": _TENSORS,
    "averaging.v1.Fresh.head": Limit(nbytes=MIB),
    "averaging.v1.Fresh.chunk": Limit(nbytes=2 * MIB),
    "averaging.v1.FreshHead.tensors": _TENSORS,
    "averaging.v1.FreshHead.made": Limit(PARTS, PEERS * 64),
    "averaging.v1.Made.contributors": _PEERS,
    "v1.DescribeRequest.names": _PARTS,
    "v1.StateManifest.tensors": Limit(PARTS, PLAN),
    "v1.StateTensor.hashes": Limit(nbytes=PLAN),
    "v1.StateChunk.data": Limit(nbytes=MIB),
    "v1.StateList.parts": Limit(PARTS, NAME + 128),
    # Cells.
    "v1.CellsNote.named": Limit(nbytes=CELLS * CELL_HOSTS_BYTES + 32 * KIB),
    "v1.GroupNote.members": Limit(CELLS, CELL_HOSTS_BYTES + KIB),
    "v1.AcceptanceNote.hosts": Limit(CELL_STAGES, CELL_HOSTS * (CELL_ADDRESSES + 1) * NAME),
    "v1.StageHosts.peers": Limit(CELL_HOSTS, (CELL_ADDRESSES + 1) * NAME),
    "v1.StageHost.maddrs": Limit(CELL_ADDRESSES, NAME),
    # Questions, handshakes and connections.
    "v1.AskReach.ports": Limit(4),
    "v1.ManifestAnswer.toml": Limit(nbytes=64 * KIB),
    "v1.PeersAnswer.peers": Limit(4 * PEERS, 2 * KIB),
    "v1.ReachAnswer.open": Limit(4),
    "v1.Hello.addresses": Limit(8, NAME),
    "v1.Hello.mapped": Limit(8, NAME),
    "v1.PunchAsk.addresses": Limit(64, NAME),
    "v1.PunchAnswer.addresses": Limit(64, NAME),
    "v1.BypassAsk.addresses": Limit(4, NAME),
    "v1.BypassAnswer.addresses": Limit(4, NAME),
    # Forward-only work for peers without the ends.
    "v1.GenerateRequest.prompt": Limit(nbytes=64 * KIB),
    "v1.GenerateRequest.stop": Limit(STOPS, NAME),
    "v1.GenerateRequest.messages": Limit(MESSAGES, 65 * KIB),
    "v1.ChatMessage.role": Limit(nbytes=NAME),
    "v1.ChatMessage.content": Limit(nbytes=64 * KIB),
    "v1.Piece.text": Limit(nbytes=64 * KIB),
    "v1.LeaveOut.stages": _SKIPPED,
    "v1.Missing.asked": _SKIPPED,
    "v1.Missing.dead": _SKIPPED,
}
"""Bounds of each field that repeats, or that may be longer than :data:`TEXT`."""
