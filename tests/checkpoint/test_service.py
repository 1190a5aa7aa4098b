import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from node.checkpoint import pins, service
from node.checkpoint.errors import NoDonor
from node.checkpoint.fetch import FetchTimeouts, Partial, fetch
from node.checkpoint.service import StateService
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.state import StateKind
from node.core.errors import OutOfResources, UsageFault
from node.core.ids import PeerId
from node.core.journey import Version
from node.wire import tensors
from node.wire.tensors import HASH, digest, encode, hash_of, hashes_of
from protos import state_pb2, state_pb2_grpc, tensor_pb2
from testbed.fakes.clock import VirtualClock
from testbed.fakes.memory_net import MemoryNet, MemoryTransport
from tests.transport.conftest import until

SETTINGS = CheckpointSettings(fetch_parallel=3)
QUICK = FetchTimeouts(60, stall_s=60, request_s=60, tries=2, pause_s=0.01, again_s=60)
ME = PeerId("joiner")
SHAPES = {
    "embed.weight": (300, 50),
    "layer.0.weight": (40, 40),
    "layer.1.weight": (40, 40),
    "norm": (7,),
    "scalar": (),
    "none": (0, 4),
}


def values(seed: int = 1) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


class Held:
    """A provider: epoch -> tensors, the last one newest; counts how often it is asked."""

    def __init__(
        self,
        epochs: Mapping[int, Mapping[str, torch.Tensor]],
        kind: StateKind = StateKind.PARAMETERS,
        lineage: str = "",
    ) -> None:
        self.epochs = dict(epochs)
        self.kind = kind
        self.lineage = lineage
        self.asked = 0

    def describe(
        self, stage: int, kind: StateKind, epoch: int | None, lineage: str
    ) -> tuple[Version, Mapping[str, torch.Tensor]] | None:
        self.asked += 1
        epoch = max(self.epochs) if epoch is None else epoch
        if (
            stage != 1
            or kind != self.kind
            or epoch not in self.epochs
            or lineage not in ("", self.lineage)
        ):
            return None
        return Version(epoch, self.lineage), self.epochs[epoch]

    def listing(self, stage: int, kind: StateKind) -> Mapping[str, Version]:
        names = {key.rpartition("/")[0] for key in self.epochs[max(self.epochs)]}
        return (
            dict.fromkeys(names, Version(max(self.epochs), self.lineage))
            if (stage, kind) == (1, self.kind)
            else {}
        )


async def at_once(*_: object) -> None:
    """Waits for nothing."""


class Odd(StateService):
    """A donor that is late or lies.

    `before_description` and `before_pieces`, which gets the request, are awaited before an answer.
    `describes` may change a description; `sends` returns another chunk for a request and its chunk,
    or None for none.
    """

    def __init__(
        self,
        *args: Any,
        describes: Callable[[state_pb2.StateManifest], object] = lambda manifest: None,
        sends: Callable[[state_pb2.FetchRequest, state_pb2.StateChunk], object] = (
            lambda request, chunk: chunk
        ),
        before_description: Callable[[], Awaitable[object]] = at_once,
        before_pieces: Callable[[state_pb2.FetchRequest], Awaitable[object]] = at_once,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self.describes = describes
        self.sends = sends
        self.before_description = before_description
        self.before_pieces = before_pieces

    async def Describe(
        self, request: state_pb2.DescribeRequest, context: Any
    ) -> state_pb2.StateManifest:
        await self.before_description()
        manifest = await super().Describe(request, context)
        self.describes(manifest)
        return manifest

    async def pieces(
        self, request: state_pb2.FetchRequest, peer: PeerId
    ) -> AsyncGenerator[Any, None]:
        await self.before_pieces(request)
        async for chunk in super().pieces(request, peer):
            if (spoilt := self.sends(request, chunk)) is not None:
                yield spoilt


class Swarm:
    def __init__(self) -> None:
        self.net = MemoryNet()
        self.me = self.net.transport(ME)
        self.services: dict[PeerId, StateService] = {}

    async def donor(
        self, name: str, held: Held, made: type[StateService] = StateService, **more: Any
    ) -> PeerId:
        transport = self.net.transport(name)
        self.services[PeerId(name)] = made(transport, held, more.pop("settings", SETTINGS), **more)
        await transport.start()
        return PeerId(name)

    async def fetch(self, donors: list[PeerId], epoch: int | None = 3, **more: Any) -> Any:
        more = {"settings": SETTINGS, "patience": QUICK, **more}
        version = None if epoch is None else Version(epoch, more.pop("lineage", ""))
        kind = more.pop("kind", "parameters")
        shapes = more.pop("shapes", SHAPES)
        return await fetch(self.me, donors, 1, kind, version, shapes, **more)

    def given(self, peer: PeerId) -> int:
        """Bytes of state that a donor has sent."""
        return self.net.transports[peer]._bytes.get(ME, [0, 0])[0]

    def blamed(self) -> set[PeerId]:
        return {peer for peer, _, weight in self.me.faults if weight >= 1}

    def transport(self, peer: PeerId) -> MemoryTransport:
        return self.net.transports[peer]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor has six pieces."""
    monkeypatch.setattr(tensors, "PIECE", 10_000)


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    made = Swarm()
    await made.me.start()
    yield made
    await made.net.close()


@pytest.fixture
async def good(swarm: Swarm) -> PeerId:
    """A donor of epoch 3."""
    return await swarm.donor("good", Held({3: values()}))


def files(where: Path) -> list[str]:
    return sorted(p.name for p in where.iterdir())


def same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[n], expected[n]) for n in got)


@pytest.mark.parametrize("names", [tuple(SHAPES), ("embed.weight",)], ids=["stage", "tensor"])
async def test_state_comes_from_all_donors_and_is_exact(
    swarm: Swarm, names: tuple[str, ...]
) -> None:
    state = {name: values()[name] for name in names}
    asked = set[int]()
    all_asked = asyncio.Event()

    async def until_all_are_asked(donor: int, request: state_pb2.FetchRequest) -> None:
        asked.add(donor)
        if len(asked) == 3:
            all_asked.set()
        await all_asked.wait()

    donors = [
        await swarm.donor(
            f"donor{i}", Held({3: state}), Odd, before_pieces=partial(until_all_are_asked, i)
        )
        for i in range(3)
    ]
    told: list[tuple[int, int]] = []
    snapshot = await swarm.fetch(
        donors,
        shapes={name: SHAPES[name] for name in names},
        expected_digest=digest(state) if len(names) > 1 else None,
        progress=lambda *a: told.append(a),
        # So that pieces are left for the donor that describes its state last.
        settings=CheckpointSettings(fetch_parallel=1),
    )
    assert same(snapshot.tensors, state)
    assert snapshot.version == Version(3)
    total = sum(t.numel() for t in state.values()) * 4
    assert set(snapshot.sources) == set(donors)
    assert sum(snapshot.sources.values()) == total == sum(map(swarm.given, donors))
    assert (told[-1], told) == ((total, total), sorted(told))
    assert swarm.me.faults == []


async def test_optimizer_state_of_the_parts_that_are_asked(swarm: Swarm) -> None:
    state = {
        "a/momentum": torch.randn(4, 4),
        "a/step": torch.tensor(12),
        "b/momentum": torch.randn(2),
    }
    donor = await swarm.donor("owner", Held({3: state}, StateKind.OPTIMIZER))
    snapshot = await swarm.fetch(
        [donor], kind=StateKind.OPTIMIZER, shapes={"a/momentum": (4, 4), "a/step": ()}
    )
    assert torch.equal(snapshot.tensors["a/momentum"], state["a/momentum"])
    assert snapshot.tensors["a/step"] == 12
    with pytest.raises(NoDonor, match="not all of these"):
        await swarm.fetch([donor], kind="optimizer", shapes={"c/momentum": (2,)})
    assert swarm.blamed() == set()


async def test_the_newest_epoch_most_donors_agree_on(swarm: Swarm) -> None:
    ahead = await swarm.donor("ahead", Held({9: values(9)}))
    others = [await swarm.donor(f"d{i}", Held({3: values(), 4: values(4)})) for i in range(2)]
    snapshot = await swarm.fetch([ahead, *others], epoch=None)
    assert snapshot.version.epoch == 4
    assert same(snapshot.tensors, values(4))


async def test_state_of_an_epoch_beyond_the_run_is_a_fault(swarm: Swarm) -> None:
    liar = await swarm.donor("liar", Held({(1 << 64) - 1: values(9)}))
    honest = await swarm.donor("honest", Held({4: values(4)}))
    snapshot = await swarm.fetch([liar, honest], epoch=None, most_epoch=100)
    assert (snapshot.version.epoch, swarm.blamed()) == (4, {liar})


async def test_training_goes_on_while_a_joiner_reads(swarm: Swarm) -> None:
    """The donor's parameters are replaced between two requests; the joiner still gets the epoch it
    asked for."""
    held = Held({3: values()})
    donor = await swarm.donor("donor", held)

    def replace(*args: object) -> None:
        held.epochs = {4: values(4)}

    assert same((await swarm.fetch([donor], progress=replace)).tensors, values())
    assert same((await swarm.fetch([donor], epoch=3)).tensors, values()), "pinned until it expires"
    with pytest.raises(NoDonor, match="not held"):
        await swarm.fetch([donor], epoch=2)


# Donors that fail.


async def test_a_donor_that_dies_in_the_middle(swarm: Swarm) -> None:
    donors = [await swarm.donor(f"donor{i}", Held({3: values()})) for i in range(2)]
    kills: list[asyncio.Future[None]] = []

    def kill(done: int, total: int) -> None:
        if not kills and done > total // 4:
            kills.append(asyncio.ensure_future(swarm.net.kill(donors[0])))

    snapshot = await swarm.fetch(donors, expected_digest=digest(values()), progress=kill)
    assert same(snapshot.tensors, values())
    assert (len(kills), swarm.blamed()) == (1, set())


async def test_a_line_that_breaks_once_costs_no_donor(swarm: Swarm) -> None:
    broken = iter(range(SETTINGS.fetch_parallel))  # every request that is under way

    def breaks_once(request: object, chunk: state_pb2.StateChunk) -> state_pb2.StateChunk:
        if next(broken, None) is not None:
            raise RuntimeError("broken on purpose")
        return chunk

    donor = await swarm.donor("donor", Held({3: values()}), Odd, sends=breaks_once)
    assert same((await swarm.fetch([donor])).tensors, values())


async def test_a_donor_that_describes_late_gives_too_and_holds_nobody_up(swarm: Swarm) -> None:
    begun = asyncio.Event()
    given = asyncio.Event()

    async def until_given(request: object) -> None:
        begun.set()
        await given.wait()

    def gives(request: object, chunk: state_pb2.StateChunk) -> state_pb2.StateChunk:
        given.set()
        return chunk

    late = await swarm.donor(
        "late", Held({3: values()}), Odd, before_description=begun.wait, sends=gives
    )
    never = await swarm.donor("never", Held({3: values()}))
    swarm.net.mute(never)
    slow = await swarm.donor("slow", Held({3: values()}), Odd, before_pieces=until_given)
    snapshot = await swarm.fetch([never, late, slow], expected_digest=digest(values()))
    assert same(snapshot.tensors, values())
    assert set(snapshot.sources) == {late, slow}


async def test_without_a_digest_a_late_description_holds_nobody_up(swarm: Swarm) -> None:
    """Two of three donors agree; the third describes its state after the others were asked for
    pieces, and gives some too."""
    begun = asyncio.Event()
    given = asyncio.Event()

    async def until_given(request: object) -> None:
        begun.set()
        await given.wait()

    def gives(request: object, chunk: state_pb2.StateChunk) -> state_pb2.StateChunk:
        given.set()
        return chunk

    late = await swarm.donor(
        "late", Held({3: values()}), Odd, before_description=begun.wait, sends=gives
    )
    others = [
        await swarm.donor(f"slow{i}", Held({3: values()}), Odd, before_pieces=until_given)
        for i in range(2)
    ]
    snapshot = await swarm.fetch([late, *others])
    assert same(snapshot.tensors, values())
    assert late in snapshot.sources


async def test_a_donor_that_goes_silent_while_sending(swarm: Swarm, good: PeerId) -> None:
    async def stall(request: state_pb2.FetchRequest) -> None:
        if request.offset:
            await asyncio.Event().wait()

    stalled = await swarm.donor("stalls", Held({3: values()}), Odd, before_pieces=stall)
    snapshot = await swarm.fetch(
        [stalled, good], patience=FetchTimeouts(describe_s=60, stall_s=60, again_s=0.01)
    )
    assert same(snapshot.tensors, values()), "what it keeps back comes from the other one"
    assert swarm.blamed() == set()


async def test_a_donor_that_sends_late_is_not_given_up_while_others_send(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All donors share the reader's line: more donors make each of them slower, and not silent."""
    monkeypatch.setattr(service, "MESSAGE", 1000)
    capped = CheckpointSettings(fetch_parallel=1, max_up=10_000)
    first = asyncio.Event()
    sent = list[int]()

    def sends(request: state_pb2.FetchRequest, chunk: state_pb2.StateChunk) -> state_pb2.StateChunk:
        sent.append(len(chunk.data))
        if len(sent) == 40:  # after four seconds, of which the other one was silent
            first.set()
        return chunk

    donors = [
        await swarm.donor("steady", Held({3: values()}), Odd, sends=sends, settings=capped),
        await swarm.donor(
            "later", Held({3: values()}), Odd, before_pieces=lambda request: first.wait()
        ),
    ]
    snapshot = await swarm.fetch(
        donors,
        settings=capped,
        patience=FetchTimeouts(60, stall_s=2.0, request_s=60, tries=1, again_s=60),
    )
    assert same(snapshot.tensors, values())
    assert set(snapshot.sources) == set(donors)


async def test_a_fetch_without_donors_fails_with_reasons(swarm: Swarm, good: PeerId) -> None:
    with pytest.raises(NoDonor) as caught:
        await swarm.fetch([good, PeerId("gone")], epoch=7)
    assert caught.value.reasons.keys() == {good, "gone"}
    with pytest.raises(NoDonor, match="nobody to ask"):
        await swarm.fetch([])


# Donors that lie.


def piece(chunk: state_pb2.StateChunk, **changes: Any) -> state_pb2.StateChunk:
    return state_pb2.StateChunk(**{"offset": chunk.offset, "data": chunk.data, **changes})


def flipped(chunk: state_pb2.StateChunk) -> state_pb2.StateChunk:
    return piece(chunk, data=bytes([chunk.data[0] ^ 1]) + chunk.data[1:])


GARBAGE: dict[str, Callable[[object, state_pb2.StateChunk], object]] = {
    "other bytes": lambda _, chunk: flipped(chunk),
    "too much": lambda _, chunk: piece(chunk, data=chunk.data + b"x"),
    "another place": lambda _, chunk: piece(chunk, offset=chunk.offset + 4),
    "nothing": lambda _, chunk: None,
    "empty pieces": lambda _, chunk: piece(chunk, data=b""),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_a_donor_that_sends_garbage_is_counted_and_replaced(
    swarm: Swarm, good: PeerId, kind: str
) -> None:
    liar = await swarm.donor("liar", Held({3: values()}), Odd, sends=GARBAGE[kind])
    with pytest.raises(NoDonor):
        await swarm.fetch([liar])
    assert swarm.blamed() == {liar}
    snapshot = await swarm.fetch([liar, good], expected_digest=digest(values()))
    assert same(snapshot.tensors, values())
    assert swarm.blamed() == {liar}


def bomb(manifest: state_pb2.StateManifest) -> None:
    head = next(t.head for t in manifest.tensors if t.head.name == "norm")
    head.shape[:] = [1 << 40]
    head.nbytes = 4 << 40


FALSE: dict[str, Callable[[state_pb2.StateManifest], object]] = {
    "a bomb": bomb,
    "half precision": lambda m: setattr(m.tensors[0].head, "wire", tensor_pb2.FP16),
    "an extra tensor": lambda m: setattr(m.tensors.add().head, "name", "../../extra"),
    "a tensor twice": lambda m: m.tensors.append(m.tensors[0]),
    "a hash too few": lambda m: setattr(m.tensors[0], "hashes", m.tensors[0].hashes[HASH:]),
    "another hash": lambda m: setattr(m.tensors[0], "hashes", bytes(len(m.tensors[0].hashes))),
    "no digest": lambda m: setattr(m, "digest", "../" * 20 + "etcd"),
    "another epoch": lambda m: setattr(m, "epoch", m.epoch + 1),
}


@pytest.mark.parametrize("kind", FALSE)
async def test_a_false_description_is_refused_before_a_byte(
    swarm: Swarm, good: PeerId, kind: str, tmp_path: Path
) -> None:
    liar = await swarm.donor("liar", Held({3: values()}), Odd, describes=FALSE[kind])
    snapshot = await swarm.fetch([liar, good], partial=Partial(tmp_path / "partial"))
    assert (set(snapshot.sources), swarm.blamed()) == ({good}, {liar})


@pytest.mark.parametrize(
    ("state", "claims"),
    [
        (values(666), {}),
        (
            {**values(), "norm": torch.zeros(7)},
            {"describes": lambda m: setattr(m, "digest", digest(values()))},
        ),
    ],
    ids=["of-its-own-digest", "under-the-true-digest"],
)
async def test_another_state_than_the_swarm_agreed_on_is_refused(
    swarm: Swarm, good: PeerId, state: dict[str, torch.Tensor], claims: dict[str, Any]
) -> None:
    liars = [await swarm.donor(f"liar{i}", Held({3: state}), Odd, **claims) for i in range(2)]
    snapshot = await swarm.fetch([*liars, good], expected_digest=digest(values()))
    assert same(snapshot.tensors, values())
    assert swarm.blamed() == set(liars)
    assert set(snapshot.sources) == {good}, "not a byte of them is fetched"


async def test_one_bad_donor_is_found_when_tensors_are_mixed(swarm: Swarm) -> None:
    def spoils_then_fails(
        request: state_pb2.FetchRequest, chunk: state_pb2.StateChunk
    ) -> state_pb2.StateChunk:
        if request.offset:
            raise RuntimeError("broken on purpose")
        return flipped(chunk)

    bad = await swarm.donor("bad", Held({3: values()}), Odd, sends=spoils_then_fails)
    good = [await swarm.donor(f"good{i}", Held({3: values()})) for i in range(2)]
    for _ in range(3):
        assert same((await swarm.fetch([bad, *good])).tensors, values())
    assert not swarm.blamed() & set(good), "an honest donor is never blamed for bytes of another"


# Going on where it stopped.


async def breaks_at_norm(request: state_pb2.FetchRequest) -> None:
    if request.name == "norm":
        raise RuntimeError("broken on purpose")


ONE_BY_ONE = CheckpointSettings(fetch_parallel=1)


async def test_verified_tensors_survive_a_broken_donor_and_a_restart(
    swarm: Swarm, good: PeerId, tmp_path: Path
) -> None:
    breaks = await swarm.donor("breaks", Held({3: values()}), Odd, before_pieces=breaks_at_norm)
    with pytest.raises(NoDonor):
        await swarm.fetch([breaks], partial=Partial(tmp_path / "state"), settings=ONE_BY_ONE)
    # by name, so these are done
    large = [t for n, t in values().items() if n.endswith(".weight")]
    each = b"".join(hashes_of(encode(t, "fp32")) for t in large)
    assert set(files(tmp_path / "state")) == {"version"} | {
        each[at : at + HASH].hex() + ".piece" for at in range(0, len(each), HASH)
    }

    told: list[int] = []
    snapshot = await swarm.fetch(
        [good],
        partial=Partial(tmp_path / "state"),
        expected_digest=digest(values()),
        progress=lambda done, *_: told.append(done),
    )
    assert same(snapshot.tensors, values())
    assert snapshot.sources == {good: 8 * 4}, "only what was missing"
    assert told[0] > sum(t.numel() for t in large) * 4, "what was kept counts as done"
    assert files(tmp_path) == [], "nothing is left lying about"


async def test_kept_files_are_believed_only_by_their_hash(
    swarm: Swarm, good: PeerId, tmp_path: Path
) -> None:
    name = hash_of(encode(values()["norm"], "fp32")).hex()
    (tmp_path / f"{name}.piece").write_bytes(b"\0" * 28)
    (tmp_path / f"{name}.tensor").write_bytes(b"of a former version")
    (tmp_path / "mine.txt").write_text("not of this store")
    assert same((await swarm.fetch([good], partial=Partial(tmp_path))).tensors, values())
    assert files(tmp_path) == ["mine.txt"]


async def test_a_piece_that_two_tensors_have_is_kept_once(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests may bring the same tensor at the same moment."""
    made = list[str]()
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda p, d: made.append(p.name) or write(p, d))
    ones = {f"layer.{i}.norm": torch.ones(50) for i in range(20)}
    donor = await swarm.donor("donor", Held({3: ones}))
    snapshot = await swarm.fetch(
        [donor], shapes=dict.fromkeys(ones, (50,)), partial=Partial(tmp_path / "in")
    )
    assert same(snapshot.tensors, ones)
    assert len(made) == 1


async def test_a_full_disk_stops_a_fetch_that_keeps_files(
    swarm: Swarm, good: PeerId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutOfResources):
        await swarm.fetch([good], partial=Partial(tmp_path))
    async with asyncio.timeout(30):
        while files(tmp_path) != ["version"]:  # noqa: ASYNC110 - a thread may remove its own yet
            await asyncio.sleep(0.01)


# The donor's own limits.


def asking(**fields: Any) -> state_pb2.FetchRequest:
    """Request for the whole tensor "norm" of epoch 3, with `fields` changed."""
    norm = {"stage": 1, "kind": state_pb2.PARAMETERS, "epoch": 3, "name": "norm", "length": 28}
    return state_pb2.FetchRequest(**(norm | fields))


@pytest.fixture
async def two_at_once(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> tuple[PeerId, VirtualClock, pins.Pins]:
    """A donor of many epochs that pins two of them for strangers."""
    monkeypatch.setattr(pins, "PINS", 4)
    monkeypatch.setattr(pins, "OF_STRANGER", 9)
    clock = VirtualClock()
    held = Held({e: values(e) for e in range(1, 9)})
    donor = await swarm.donor("donor", held, clock=clock)
    return donor, clock, swarm.services[donor].pins


async def test_few_snapshots_are_held_and_not_for_ever(swarm: Swarm, two_at_once: Any) -> None:
    donor, clock, held = two_at_once
    for epoch in (1, 2):
        assert (await swarm.fetch([donor], epoch=epoch)).version.epoch == epoch
    with pytest.raises(NoDonor, match="in use"):
        await swarm.fetch([donor], epoch=3)
    assert swarm.blamed() == set()
    clock.advance(61)
    assert (await swarm.fetch([donor], epoch=3)).version.epoch == 3
    assert len(held) == 1


async def test_an_unread_snapshot_gives_way_when_the_limit_is_reached(
    swarm: Swarm, two_at_once: Any
) -> None:
    donor, clock, held = two_at_once
    for epoch in range(1, 8):
        assert (await swarm.fetch([donor], epoch=epoch)).version.epoch == epoch, (
            "epochs that follow each other every 3 s"
        )
        clock.advance(3)
    assert len(held) == 2
    for pin in held._pins.values():
        pin.readers = 1
    with pytest.raises(NoDonor, match="in use"):
        await swarm.fetch([donor], epoch=8)


async def test_one_joiner_cannot_hash_a_donor_to_death(swarm: Swarm) -> None:
    held = Held({3: values()})
    donor = await swarm.donor("donor", held)
    for _ in range(3):
        await swarm.fetch([donor])
    assert held.asked == 1, "an epoch is described once"


async def test_requests_outside_what_is_held_get_a_status(swarm: Swarm, good: PeerId) -> None:
    stub = state_pb2_grpc.StateStub(await swarm.me.channel(good))

    async def ask(**fields: Any) -> str:
        try:
            return str(sum([len(c.data) async for c in stub.Fetch(asking(**fields), timeout=5)]))
        except Exception as e:  # noqa: BLE001 - the code is the result
            return e.code().name  # type: ignore[attr-defined]

    assert await ask() == "NOT_FOUND", "not described yet"
    await stub.Describe(
        state_pb2.DescribeRequest(stage=1, kind=state_pb2.PARAMETERS, any_epoch=True), timeout=5
    )
    for fields, answer in (
        ({}, "28"),
        ({"offset": 4, "length": 24}, "24"),
        ({"offset": 4}, "INVALID_ARGUMENT"),
        ({"length": 0}, "INVALID_ARGUMENT"),
        ({"offset": 2**63, "length": 2**63}, "INVALID_ARGUMENT"),
        ({"length": 2**64 - 1}, "INVALID_ARGUMENT"),
        ({"name": "x"}, "NOT_FOUND"),
        ({"stage": 2}, "NOT_FOUND"),
        ({"epoch": 4}, "NOT_FOUND"),
        *(({"kind": kind}, "NOT_FOUND") for kind in (2, 0, 99)),
    ):
        assert await ask(**fields) == answer, fields


async def test_more_streams_than_one_joiner_may_open_are_refused(swarm: Swarm) -> None:
    donor = await swarm.donor("donor", Held({3: values()}), settings=CheckpointSettings(max_up=1.0))
    stub = state_pb2_grpc.StateStub(await swarm.me.channel(donor))
    await stub.Describe(
        state_pb2.DescribeRequest(stage=1, kind=state_pb2.PARAMETERS, epoch=3), timeout=5
    )
    # one goes at once, the others are held open by the rate limit
    calls = [stub.Fetch(asking(), timeout=20) for _ in range(18)]
    codes = [asyncio.ensure_future(call.code()) for call in calls]
    done, _ = await asyncio.wait(codes, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    names = [code.result().name for code in done]
    for call in calls:
        call.cancel()
    assert [name for name in names if name != "OK"] == ["RESOURCE_EXHAUSTED"]


async def read_all(call: Any) -> None:
    while isinstance(await call.read(), state_pb2.StateChunk):
        pass


async def test_a_reader_that_does_not_read_holds_nothing(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "UNREAD_S", 0.5)
    large = {"norm": torch.zeros(4 << 20)}
    donor = await swarm.donor("donor", Held({3: large}))
    stub = state_pb2_grpc.StateStub(await swarm.me.channel(donor))
    await stub.Describe(
        state_pb2.DescribeRequest(stage=1, kind=state_pb2.PARAMETERS, epoch=3), timeout=5
    )
    (pin,) = swarm.services[donor].pins._pins.values()
    call = stub.Fetch(asking(length=16 << 20))
    assert isinstance(await call.read(), state_pb2.StateChunk)
    await until(lambda: pin.readers == 0, 20)
    with pytest.raises(grpc.aio.AioRpcError, match="not taken in time"):
        await read_all(call)
    monkeypatch.setattr(service, "UNREAD_S", 30.0)
    assert same((await swarm.fetch([donor], shapes={"norm": (4 << 20,)})).tensors, large)


async def test_a_peer_that_was_not_told_of_a_snapshot_cannot_read_it(
    swarm: Swarm, good: PeerId
) -> None:
    await swarm.fetch([good])
    other = swarm.net.transport("other")
    await other.start()
    stub = state_pb2_grpc.StateStub(await other.channel(good))
    with pytest.raises(grpc.aio.AioRpcError, match="describe first"):
        await stub.Fetch(asking(), timeout=5).read()


HERE = "a" * 32
THERE = "b" * 32


async def test_a_donor_of_another_lineage_is_not_blamed(swarm: Swarm) -> None:
    good = await swarm.donor("good", Held({3: values()}, lineage=HERE))
    other = await swarm.donor("other", Held({3: values(9)}, lineage=THERE))
    snapshot = await swarm.fetch([other, good], lineage=HERE)
    assert same(snapshot.tensors, values())
    assert (snapshot.version, set(snapshot.sources)) == (Version(3, HERE), {good})
    assert swarm.me.faults == []
    assert (await swarm.fetch([other])).version == Version(3, THERE), (
        "any history will do when none is named"
    )


async def test_a_pinned_epoch_of_one_history_is_not_given_as_another(swarm: Swarm) -> None:
    held = Held({3: values()}, lineage=HERE)
    donor = await swarm.donor("donor", held)
    await swarm.fetch([donor], lineage=HERE)
    held.epochs = {3: values(9)}
    held.lineage = THERE
    assert same((await swarm.fetch([donor], lineage=HERE)).tensors, values()), "held still"
    assert same((await swarm.fetch([donor], lineage=THERE)).tensors, values(9))


@pytest.mark.parametrize("lineage", [THERE, "../../etc"])
async def test_a_wrong_history_counts_against_the_donor(swarm: Swarm, lineage: str) -> None:
    liar = await swarm.donor(
        "liar",
        Held({3: values()}, lineage=HERE),
        Odd,
        describes=lambda m: setattr(m, "lineage", lineage),
    )
    with pytest.raises(NoDonor):
        await swarm.fetch([liar], lineage=HERE)
    assert swarm.blamed() == {liar}


async def test_what_is_kept_of_parts_is_listed(swarm: Swarm) -> None:
    held = Held(
        {3: {"a/momentum": torch.ones(2), "b/momentum": torch.ones(3)}}, StateKind.SPARE, HERE
    )
    donor = await swarm.donor("donor", held)
    stub = state_pb2_grpc.StateStub(await swarm.me.channel(donor))
    found = await stub.List(state_pb2.ListRequest(stage=1, kind=state_pb2.SPARE), timeout=5)
    assert [(p.name, p.epoch, p.lineage) for p in found.parts] == [("a", 3, HERE), ("b", 3, HERE)]
    assert not (
        await stub.List(state_pb2.ListRequest(stage=2, kind=state_pb2.SPARE), timeout=5)
    ).parts
    assert len(swarm.services[donor].pins) == 0, "a list holds nothing still"
    for kind in (state_pb2.PARAMETERS, state_pb2.KIND_UNSPECIFIED):
        with pytest.raises(grpc.aio.AioRpcError, match="StatusCode.INVALID_ARGUMENT"):
            await stub.List(state_pb2.ListRequest(stage=1, kind=kind), timeout=5)


async def test_later_spares_are_served_beside_pinned_ones(swarm: Swarm) -> None:
    first = {"a/momentum": torch.ones(2)}
    later = {"b/momentum": torch.full((3,), 2.0)}
    held = Held({}, StateKind.SPARE, HERE)
    donor = await swarm.donor("donor", held)
    for now, asked in ((first, first), (later, later), (later, first)):
        held.epochs = {3: now}
        shapes = {name: tuple(t.shape) for name, t in asked.items()}
        got = await swarm.fetch([donor], kind="spare", shapes=shapes, lineage=HERE)
        assert same(got.tensors, asked)


async def test_a_tensor_served_whole_is_reported(swarm: Swarm) -> None:
    told: list[tuple[StateKind, Version, str]] = []
    donor = await swarm.donor(
        "donor", Held({3: values()}, lineage=HERE), on_served=lambda *a: told.append(a)
    )
    stub = state_pb2_grpc.StateStub(await swarm.me.channel(donor))
    await stub.Describe(
        state_pb2.DescribeRequest(stage=1, kind=state_pb2.PARAMETERS, epoch=3), timeout=5
    )

    async def take(offset: int, length: int) -> None:
        request = asking(name="layer.0.weight", offset=offset, length=length)
        async for _ in stub.Fetch(request, timeout=5):
            pass

    await take(0, 6399)
    assert told == []
    await take(6399, 1)
    assert told == [(StateKind.PARAMETERS, Version(3, HERE), "layer.0.weight")]


async def test_no_request_begins_while_the_gate_is_shut(swarm: Swarm) -> None:
    gate = asyncio.Event()
    asked = asyncio.Event()
    donor = await swarm.donor("donor", Held({3: values()}), Odd, describes=lambda _: asked.set())
    going = asyncio.ensure_future(swarm.fetch([donor], gate=gate))
    await asked.wait()
    for _ in range(3):
        await swarm.me.ping(donor)  # time for a request that should not be made
    assert not swarm.given(donor)
    gate.set()
    assert same((await going).tensors, values())


async def test_a_broken_fetch_resumes_its_version_and_drops_others(
    swarm: Swarm, tmp_path: Path
) -> None:
    held = Held({3: values()}, lineage=HERE)
    donor = await swarm.donor("donor", held)
    partial = Partial(tmp_path / "in")
    partial.keep(b"c" * HASH, memoryview(b"any"))
    await swarm.fetch([donor], epoch=None)  # held still from now on
    held.epochs = {4: values(4)}
    partial.version = Version(3, HERE)
    assert (await swarm.fetch([donor], epoch=None, partial=partial)).version == Version(3, HERE)
    assert partial.version is None
    assert not (tmp_path / "in").exists(), "the piece of no version is gone too"
    gone = await swarm.donor("gone", Held({5: values(5)}), Odd, sends=GARBAGE["nothing"])
    partial = Partial(tmp_path / "in")
    partial.keep(b"c" * HASH, memoryview(b"any"))
    with pytest.raises(NoDonor):
        await swarm.fetch([gone], epoch=None, partial=partial)
    assert files(tmp_path / "in") == ["version"], "also when nothing comes of it"
    partial.version = Version(2, HERE)
    assert (await swarm.fetch([donor], epoch=None, partial=partial)).version == Version(4, HERE), (
        "what nobody has is let go"
    )


@pytest.mark.parametrize("damage", [None, b"", b"x " + b"0" * 32, b"\xff", b"-3 "])
async def test_a_restart_resumes_the_version_under_way(
    swarm: Swarm, tmp_path: Path, damage: bytes | None
) -> None:
    """The swarm has gone on meanwhile. The newest version is fetched if the file that names the
    version under way is damaged."""
    held = Held({3: values()}, lineage=HERE)
    donor = await swarm.donor("donor", held, Odd, before_pieces=breaks_at_norm)
    with pytest.raises(NoDonor):
        await swarm.fetch([donor], None, partial=Partial(tmp_path / "in"), settings=ONE_BY_ONE)
    swarm.services[donor].before_pieces = at_once
    held.epochs = {4: values(4)}
    if damage is not None:
        (tmp_path / "in" / "version").write_bytes(damage)
    snapshot = await swarm.fetch([donor], None, partial=Partial(tmp_path / "in"))
    epoch = 3 if damage is None else 4
    assert snapshot.version == Version(epoch, HERE)
    assert same(snapshot.tensors, values(1 if epoch == 3 else 4))
    if damage is None:
        assert snapshot.sources == {donor: 8 * 4}, "only what was missing"
    assert files(tmp_path) == [], "nothing is left lying about"


async def test_what_a_run_begins_from_is_read_where_it_is_kept(swarm: Swarm) -> None:
    """The donor is long past it, and its own stage is another one."""
    asked: list[int] = []

    def weights(stage: int) -> Mapping[str, torch.Tensor]:
        asked.append(stage)
        if len(asked) == 1:
            raise UsageFault("no such directory", "mount it")
        return values()

    donor = await swarm.donor("donor", Held({9: values(9)}))
    swarm.services[donor]._weights = weights
    with pytest.raises(NoDonor, match="cannot be read here"):
        await swarm.fetch([donor], epoch=0, kind="base")
    snapshot = await swarm.fetch([donor], 0, kind="base", expected_digest=digest(values()))
    assert same(snapshot.tensors, values())
    assert same((await swarm.fetch([donor], epoch=None)).tensors, values(9))
    assert asked == [1, 1]
    with pytest.raises(NoDonor, match="another stage is given out"):
        await fetch(
            swarm.me, [donor], 2, "base", Version(0), SHAPES, settings=SETTINGS, patience=QUICK
        )
    assert asked == [1, 1], "one stage at a time is in memory"
    assert not swarm.blamed()
