"""``tutti export`` at a peer: every stage of one version, and the tokenizer, from other peers."""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from node.app import assembly
from node.app.export import exporter as export
from node.app.export.exporter import Exporter, ExportProgress, News
from node.app.export.merging import drawn_base
from node.app.run_files import RunFiles
from node.checkpoint import donors, pins
from node.checkpoint.errors import NoDonor
from node.checkpoint.fetch import fetch
from node.checkpoint.service import StateService, Unserved
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.state import StateKind
from node.config import NodeConfig
from node.core.errors import NetworkFault, OutOfResources, Refused, UsageFault
from node.core.ids import PeerId
from node.core.journey import UNKNOWN, Losses, Plan, PlanMember, Version
from node.data.settings import Places
from node.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from node.manifest import Manifest, amended
from node.model.settings import DIGEST
from node.model.shapes import parameter_shapes
from node.stage.state import Held
from node.wire.tensors import digest
from protos import state_pb2
from protos.control_pb2 import ExportRequest
from testbed.fakes.clock import VirtualClock
from testbed.fakes.memory_net import MemoryNet

TOKENIZER = ByteTokenizer().to_json()
SHA256 = hashlib.sha256(TOKENIZER).hexdigest()
SMALL = {
    "model.layers": 3,
    "model.d_model": 32,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.d_ff": 48,
    "pipeline.stages": 2,
}
OWN_TOKENIZER = {"data.tokenizer": "words.json", "data.tokenizer_sha256": SHA256}
SETTINGS = CheckpointSettings()


class Peer:
    """A peer that hosts a stage, gives the version in place there, as a daemon does, and counts the
    pieces it sends. `serves`: pieces it sends before it fails, None for all."""

    def __init__(self, lab: "Lab", stage: int, files: Callable[[str], bytes | None] | None) -> None:
        self.lab = lab
        self.stage = stage
        self.at = lab.version
        self.peer = PeerId(f"stage-{stage}-{len(lab.peers)}")
        self.serves: int | None = None
        self.sent = 0
        self.described = asyncio.Event()
        transport = lab.net.transport(self.peer)
        self.transport = transport
        self.service = _Counted(self, transport, files)

    def describe(
        self, stage: int, kind: StateKind, epoch: int | None, lineage: str
    ) -> tuple[Version, Mapping[str, Tensor]] | None:
        if (stage, kind, epoch) == (self.stage, StateKind.BASE, 0) and self.lab.base:
            return Version(0), self.lab.base[stage]
        if (stage, kind, epoch) != (self.stage, StateKind.PARAMETERS, self.at.epoch):
            return None
        return self.at, self.lab.tensors(stage, self.at)

    def listing(self, stage: int, kind: StateKind) -> Mapping[str, Version]:
        return {}


class _Counted(StateService):
    def __init__(self, of: Peer, transport: Any, files: Any) -> None:
        super().__init__(transport, of, SETTINGS, files=files)
        self._of = of

    async def pieces(
        self, request: state_pb2.FetchRequest, peer: PeerId
    ) -> AsyncGenerator[Any, None]:
        if self._of.serves is not None and self._of.sent >= self._of.serves:
            raise Unserved(grpc.StatusCode.UNAVAILABLE, "gone")
        self._of.sent += 1
        async for chunk in super().pieces(request, peer):
            yield chunk


class Lab:
    """A swarm of two block stages at ``version``, and one peer that exports it: it hosts stage 1,
    or ``stage``."""

    def __init__(self, root: Path, changes: Mapping[str, Any], stage: int = 1) -> None:
        self.root = root
        self.stage = stage
        self.manifest = amended(Manifest.default_demo(), {**SMALL, **changes})
        self.net = MemoryNet()
        self.me = self.net.transport("exporter")
        self.version = Version(7, "ab" * 16)
        self.peers: list[Peer] = []
        self.tokenizer: Tokenizer | None = None
        self.base: list[dict[str, Tensor]] = []
        """Weights beside which adapters are trained, of every stage."""
        self.config = NodeConfig(root / "home")
        self.config.home.mkdir()
        self.plan: Plan | None = None
        self.losses = UNKNOWN
        self.here = self.version
        self.waits = ""

    def tensors(self, stage: int, version: Version) -> dict[str, Tensor]:
        """The parameters of a stage at a version."""
        draw = torch.Generator().manual_seed(1000 * version.epoch + stage)
        m = self.manifest
        shapes = parameter_shapes(m.model, m.pipeline.stages, stage)
        return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}

    def whole(self, version: Version) -> dict[str, Tensor]:
        return {n: t for stage in range(3) for n, t in self.tensors(stage, version).items()}

    async def host(self, stage: int, files: Callable[[str], bytes | None] | None = None) -> Peer:
        made = Peer(self, stage, files)
        await made.transport.start()
        self.peers.append(made)
        return made

    def advance(self) -> Version:
        """The swarm commits an epoch: every peer has the next version, and the plan begins with
        it."""
        self.version = self.here = Version(self.version.epoch + 1, "cd" * 16)
        for peer in self.peers:
            peer.at = self.version
        self.begin()
        return self.version

    def begin(self) -> None:
        """A plan that starts from the version reaches the exporting peer."""
        members = [PlanMember(self.me.peer_id, self.stage)]
        members += [PlanMember(p.peer, p.stage) for p in self.peers]
        self.plan = Plan(
            self.version.epoch,
            1,
            members[-1].peer,
            tuple(members),
            (),
            {},
            digests={s: digest(self.tensors(s, self.version)) for s in range(3)},
            lineage=self.version.lineage,
            tokens=12_345,
            loss=2.5,
            loss_val=2.75,
        )

    def exporter(self, **request: Any) -> Exporter:
        lab = self

        class Stage:
            stage = lab.stage
            empty = False
            frozen = property(lambda _: lab.base[lab.stage] if lab.base else None)
            version = property(lambda _: lab.here)

            def held(self, epoch: int, lineage: str) -> Held | None:
                tensors = lab.tensors(lab.stage, lab.here)
                same = (epoch, lineage) == (lab.here.epoch, lab.here.lineage)
                return Held(lab.here, tensors, digest(tensors)) if same else None

        class Work:
            engines = SimpleNamespace(store=SimpleNamespace(settings=SETTINGS))
            plan = property(lambda _: lab.plan)

        a: Any = SimpleNamespace(
            manifest=self.manifest,
            tokenizer=self.tokenizer,
            stage=Stage(),
            work=Work(),
            training=SimpleNamespace(waiting_for=lambda: self.waits),
        )
        request = {"directory": str(self.root / "out" / "model"), **request}

        def hosts(stage: int) -> list[PeerId]:
            return [p.peer for p in self.peers if p.stage == stage]

        asked = ExportRequest(**request)
        return Exporter(a, self.me, self.config, hosts, asked, losses=self.losses)

    async def export(self, **request: Any) -> News:
        """Run an export and return its last news."""
        news: list[News] = []
        async with aclosing(self.exporter(**request).run()) as words:
            async for word in words:
                news.append(word)
        return news[-1]

    @property
    def out(self) -> Path:
        return self.root / "out" / "model"

    def nothing_left(self) -> bool:
        return not self.out.parent.exists() or list(self.out.parent.iterdir()) == []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(export, "FIND_S", 0.0)
    monkeypatch.setattr(export, "RETRY_S", 0.0)


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    made: list[Lab] = []

    async def lab(
        changes: Mapping[str, Any] | None = None, stages: Any = (0, 2), **more: Any
    ) -> Lab:
        made.append(Lab(tmp_path, changes or {}, **more))
        await made[0].me.start()
        for stage in stages:
            await made[0].host(stage)
        made[0].begin()
        return made[0]

    yield lab
    for one in made:
        await one.net.close()


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def holding(sha256: str) -> bytes | None:
    return TOKENIZER if sha256 == SHA256 else None


# ----------------------------------------------------------- the losses of a plan after a pause


async def test_a_plan_without_losses_is_exported_with_the_ones_heard_before(make) -> None:
    lab = await make()
    lab.losses = Losses(1.5, 1.75)
    _, _, fields = await lab.export()
    assert (fields["loss"], fields["loss_val"]) == (2.5, 2.75), "the plan knows better"
    lab.plan = replace(lab.plan, loss=0.0, loss_val=0.0)
    _, _, fields = await lab.export()
    assert (fields["loss"], fields["loss_val"]) == (1.5, 1.75)
    assert "1.7500 nats per token" in (lab.out / "README.md").read_text()


# ----------------------------------------------------------- from any peer


async def test_a_block_stage_exports_a_run_with_its_own_tokenizer(make) -> None:
    lab = await make(OWN_TOKENIZER, stages=(2,))
    await lab.host(0, holding)
    kind, text, fields = await lab.export()
    assert kind == "exported"
    assert text.startswith(f"wrote {lab.out} from epoch 7 (lineage abababab): all 3 stages, ")
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(lab.version))
    assert (lab.out / "tokenizer.json").read_bytes() == TOKENIZER
    assert fields["bytes"] == sum(f.stat().st_size for f in lab.out.iterdir())
    assert (fields["epoch"], fields["lineage"], fields["stages"]) == (7, "ab" * 16, 3)
    assert (fields["tokens"], fields["loss"], fields["loss_val"]) == (12_345, 2.5, 2.75)
    assert [p.name for p in lab.out.parent.iterdir()] == ["model"]
    assert not lab.config.export_dir(lab.manifest.run_id).exists()
    assert lab.me.faults == []


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_every_peer_writes_the_same_files(make, stage: int) -> None:
    lab = await make(stages=[s for s in range(3) if s != stage], stage=stage)
    lab.tokenizer = ByteTokenizer() if stage == 0 else None
    await lab.export()
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(lab.version))
    assert (lab.out / "tokenizer.json").read_bytes() == TOKENIZER


async def test_a_fetched_tokenizer_is_kept_and_given_to_others(make) -> None:
    lab = await make(OWN_TOKENIZER, stages=(2,))
    ends = await lab.host(0, holding)
    await lab.export()
    await lab.net.kill(ends.peer)
    lab.peers.remove(ends)
    files = RunFiles(lab.config, lab.manifest, None)
    assert files.read(SHA256) == TOKENIZER
    assert files.read("0" * 64) is None
    lab.config.tokenizer_path(lab.manifest.run_id).write_bytes(b"damaged")
    assert files.read(SHA256) is None


async def test_a_tokenizer_that_nobody_has_is_named_with_what_helps(make, tmp_path) -> None:
    lab = await make(OWN_TOKENIZER)
    with pytest.raises(
        NetworkFault, match=r"tokenizer words\.json \(sha256 .*no peer gave it"
    ) as e:
        await lab.export()
    assert "not held here" in e.value.what
    assert "tutti export DIR --tokenizer FILE" in e.value.next_step
    assert "--no-tokenizer" in e.value.next_step
    assert lab.nothing_left()
    # Both ways out work.
    (tmp_path / "mine.json").write_bytes(TOKENIZER)
    await lab.export(tokenizer=str(tmp_path / "mine.json"))
    assert (lab.out / "tokenizer.json").read_bytes() == TOKENIZER
    _, _, fields = await lab.export(without_tokenizer=True)
    assert not (lab.out / "tokenizer.json").exists()
    assert fields["tokenizer"] is False


async def test_only_the_manifest_says_which_tokenizer_is_right(make, tmp_path) -> None:
    lab = await make(OWN_TOKENIZER, stages=(2,))
    liar = await lab.host(0, lambda sha256: TOKENIZER + b" ")
    with pytest.raises(NetworkFault, match="another file than the manifest names"):
        await lab.export()
    assert [peer for peer, _, _ in lab.me.faults] == [liar.peer]
    (tmp_path / "other.json").write_bytes(TOKENIZER + b" ")
    with pytest.raises(Refused, match="the run asks for") as e:
        await lab.export(tokenizer=str(tmp_path / "other.json"))
    assert "leave  --tokenizer  away" in e.value.next_step
    with pytest.raises(UsageFault, match=r"cannot read .*missing\.json"):
        await lab.export(tokenizer=str(tmp_path / "missing.json"))
    assert lab.nothing_left()


async def test_a_tokenizer_without_a_hash_comes_from_nobody_else(make, tmp_path) -> None:
    lab = await make({"data.tokenizer": str(tmp_path / "gone.json")}, stages=(2,))
    await lab.host(0, holding)
    with pytest.raises(UsageFault, match="names no hash of it") as e:
        await lab.export()
    assert "export at a peer that hosts the ends" in e.value.next_step
    assert "--tokenizer FILE" in e.value.next_step
    # A path in somebody else's manifest is no permission to read the file there.
    (tmp_path / "gone.json").write_bytes(TOKENIZER)
    with pytest.raises(UsageFault, match="is not opened"):
        await lab.export()
    await lab.export(tokenizer=str(tmp_path / "gone.json"))
    assert (lab.out / "tokenizer.json").read_bytes() == TOKENIZER


async def test_an_adapter_needs_no_tokenizer_and_no_ends(make) -> None:
    lab = await make({**OWN_TOKENIZER, "model.adapter": 4}, stages=(2,))
    _, _, fields = await lab.export()
    found = load_file(lab.out / "adapter_model.safetensors")
    wanted = {f"base_model.model.{n}": t for n, t in lab.whole(lab.version).items()}
    assert same(found, wanted)
    assert (fields["adapter"], fields["stages"]) == (True, 2)
    assert json.loads((lab.out / "adapter_config.json").read_text())["r"] == 4


# ----------------------------------------------------------- files of the model

CONFIG = json.dumps({"eos_token": "<|pad|>", "chat_template": "T"}).encode()
GENERATION = json.dumps({"eos_token_id": [258, 257], "temperature": 0.2}).encode()
GIVEN = {"tokenizer_config.json": CONFIG, "generation_config.json": GENERATION}
WITH_FILES = {
    **OWN_TOKENIZER,
    "data.files": [f"{n}:{hashlib.sha256(c).hexdigest()}" for n, c in GIVEN.items()],
}


def holding_all(sha256: str) -> bytes | None:
    contents = (TOKENIZER, *GIVEN.values())
    return next((c for c in contents if hashlib.sha256(c).hexdigest() == sha256), None)


async def test_files_of_the_model_come_from_another_peer_to_the_byte(make) -> None:
    lab = await make(WITH_FILES, stages=(2,))
    ends = await lab.host(0, holding_all)
    await lab.export()
    for name, content in {**GIVEN, "tokenizer.json": TOKENIZER}.items():
        assert (lab.out / name).read_bytes() == content
    assert json.loads((lab.out / "config.json").read_bytes())["eos_token_id"] == [258, 257]
    ends.service._files = None  # from now on the kept copies are enough
    kept = RunFiles(lab.config, lab.manifest, None).load()
    assert (kept.chat_template, kept.eos_ids, kept.end_id) == ("T", (258, 257), 258)
    _, _, fields = await lab.export(without_tokenizer=True)
    assert not (lab.out / "tokenizer_config.json").exists()
    assert (lab.out / "generation_config.json").read_bytes() == GENERATION
    assert fields["notes"] == []


async def test_files_are_fetched_by_who_needs_them(make) -> None:
    lab = await make(WITH_FILES, stages=())
    files = RunFiles(lab.config, lab.manifest, None)
    with pytest.raises(NoDonor):
        await files.fetched(lab.me, [])
    ends = await lab.host(0, holding_all)
    assert (await files.fetched(lab.me, [ends.peer])).chat_template == "T"
    assert files.load().files == GIVEN


def for_text(lab: Any) -> tuple[RunFiles, Any]:
    """The files of the run at a joiner, and its attempt to fetch those that its text needs."""
    files = RunFiles(lab.config, lab.manifest, None)
    replicas = {p.peer: None for p in lab.peers}
    view = SimpleNamespace(replicas=lambda stage: replicas, hosting=frozenset[PeerId]())
    presence: Any = SimpleNamespace(view=view)
    return files, assembly._files_for_text(
        files, lab.me, presence, VirtualClock(), lambda step: None
    )


async def test_a_joiner_at_the_ends_fetches_the_tokenizer(make, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(assembly, "FILES_S", 0.0)
    lab = await make({**WITH_FILES, "data.rows": "chat"}, stages=())
    liar = await lab.host(0, lambda sha256: TOKENIZER + b" ")
    files, fetched = for_text(lab)
    assert set(files.missing_for_text()) == {"tokenizer.json", *GIVEN}
    with pytest.raises(UsageFault, match=r"given by no peer: .*tokenizer\.json") as e:
        await fetched
    assert "--tokenizer PATH" in e.value.next_step
    assert liar.peer in [peer for peer, _, _ in lab.me.faults]
    await lab.net.kill(liar.peer)
    lab.peers.remove(liar)
    await lab.host(0, holding_all)
    files, fetched = for_text(lab)
    await fetched
    assert files.missing_for_text() == {}
    # A fetched file is opened like a file that the user has.
    places = files.located(Places())
    assert open_tokenizer(lab.manifest.data, places).to_json() == TOKENIZER
    assert files.load().chat_template == "T"
    # A file that the user names for this run is not replaced.
    named = Places(tokenizer=str(tmp_path / "mine.json"))
    assert files.located(named) == named
    # A directory for all runs is searched first.
    (tmp_path / "all").mkdir()
    of_all = Places(tokenizer=str(tmp_path / "all"), for_all_runs=("tokenizer",))
    assert files.located(of_all) == places
    (tmp_path / "all" / "words.json").write_bytes(TOKENIZER)
    assert files.located(of_all) == of_all


async def test_only_conversations_need_the_files_beside_the_tokenizer(make) -> None:
    lab = await make(WITH_FILES, stages=())
    files, fetched = for_text(lab)
    fetched.close()
    assert set(files.missing_for_text()) == {"tokenizer.json"}


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def test_a_file_of_the_model_that_nobody_has_is_named(make) -> None:
    lab = await make(WITH_FILES, stages=(2,))
    lacking = digest_of(GENERATION)
    await lab.host(0, lambda sha256: None if sha256 == lacking else holding_all(sha256))
    with pytest.raises(NetworkFault, match=r"(?s)generation_config\.json .*not held here") as e:
        await lab.export()
    assert "--tokenizer" in e.value.next_step
    assert lab.nothing_left()
    for name, content in {**GIVEN, "tokenizer.json": TOKENIZER}.items():
        (lab.root / name).write_bytes(content)
    await lab.export(tokenizer=str(lab.root / "tokenizer.json"))
    assert (lab.out / "generation_config.json").read_bytes() == GENERATION


@pytest.mark.parametrize("given", [False, True])
async def test_adapters_are_merged_into_drawn_or_given_weights(make, given: bool) -> None:
    changes: dict[str, Any] = {"model.adapter": 2, "model.adapter_alpha": 6.0}
    plain = amended(Manifest.default_demo(), SMALL).model
    base = [drawn_base(plain, 2, stage, "fp32") for stage in range(3)]
    if given:
        for tensors in base:
            for tensor in tensors.values():
                tensor.add_(0.25)
        changes["model.weights"] = [DIGEST + digest(tensors) for tensors in base]
        changes["model.base"] = "tiny/Base-1"
    lab = await make(changes)
    lab.base = base if given else []
    _, _, fields = await lab.export(merge=True)
    wanted = {name: tensor for tensors in base for name, tensor in tensors.items()}
    adapters = lab.whole(lab.version)
    for name in list(wanted):
        down = adapters.get(name.replace(".weight", ".lora_A.weight"))
        if down is not None:
            up = adapters[name.replace(".weight", ".lora_B.weight")]
            wanted[name] = wanted[name] + 3.0 * (up @ down)
    found = load_file(lab.out / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-5)
    assert fields["adapter"] is False
    _, _, fields = await lab.export()
    assert fields["base"] == ("tiny/Base-1" if given else "")
    written = json.loads((lab.out / "adapter_config.json").read_bytes())
    assert written["base_model_name_or_path"] == (fields["base"] or None)
    assert (lab.out / "tokenizer.json").exists()


async def test_options_that_a_run_cannot_have_are_refused(make) -> None:
    lab = await make()
    with pytest.raises(UsageFault, match="trains no adapters"):
        await lab.export(merge=True)


async def test_gguf_of_adapters_needs_whole_weights(make) -> None:
    lab = await make({"model.adapter": 2})
    with pytest.raises(UsageFault, match="whole weights") as e:
        await lab.export(gguf=True)
    assert "--merge" in e.value.next_step


async def test_the_model_that_the_run_began_from_is_not_replaced(make) -> None:
    lab = await make()
    await lab.export()
    before = {file.name: file.read_bytes() for file in lab.out.iterdir()}
    lab.advance()
    node = replace(lab.config.node, weights=str(lab.out / ".." / "model"))
    lab.config = replace(lab.config, node=node)
    with pytest.raises(Refused, match="holds the model that the run began from"):
        await lab.export()
    assert {file.name: file.read_bytes() for file in lab.out.iterdir()} == before
    await lab.export(directory=str(lab.root / "out" / "next"))


async def test_what_gguf_cannot_say_is_refused_before_a_stage_is_fetched(make) -> None:
    pytest.importorskip("gguf")
    lab = await make({"model.rope_kind": "dynamic", "model.rope_factor": 2.0})
    with pytest.raises(UsageFault, match="'dynamic'"):
        await lab.export(gguf=True)
    assert not any(peer.sent for peer in lab.peers)
    assert lab.nothing_left()
    await lab.export()
    assert all(peer.sent for peer in lab.peers)


# ----------------------------------------------------------- one version


async def test_all_stages_are_of_one_version_while_the_swarm_goes_on(make, monkeypatch) -> None:
    lab = await make()
    version = lab.version
    monkeypatch.setattr(export, "AT_ONCE", 1)
    begun: list[int] = []

    async def slow(transport: Any, peers: Any, stage: int, *rest: Any, **more: Any) -> Any:
        # Between the question for a version and each fetch, everybody is two epochs further.
        begun.append(stage)
        lab.advance()
        lab.advance()
        return await fetch(transport, peers, stage, *rest, **more)

    monkeypatch.setattr(export, "fetch", slow)
    _, text, fields = await lab.export()
    assert len(begun) == 2
    assert (fields["epoch"], lab.version.epoch) == (version.epoch, version.epoch + 4)
    assert f"from epoch {version.epoch} " in text
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(version))


async def test_a_few_replicas_of_a_stage_keep_it_and_others_stand_in(make) -> None:
    lab = await make()
    for _ in range(5):
        await lab.host(2)
    lab.begin()
    await lab.export()
    replicas = [p for p in lab.peers if p.stage == 2]
    asked = [p for p in replicas if len(p.service.pins)]
    assert len(asked) == donors.ENOUGH < len(replicas)
    for peer in asked:
        peer.at = Version(99, "cd" * 16)
        peer.service.pins._pins.clear()
    await lab.export()
    assert sum(len(p.service.pins) for p in replicas if p not in asked) == len(replicas) - len(
        asked
    )


async def test_donors_are_asked_again_while_others_are_fetched(make, monkeypatch) -> None:
    """Donors let go of a version that nobody asked for lately."""
    lab = await make()
    version = lab.version
    clock = VirtualClock(0.0)
    for peer in lab.peers:
        monkeypatch.setattr(peer.service, "_clock", clock)
    monkeypatch.setattr(export, "AT_ONCE", 1)
    monkeypatch.setattr(export, "RENEW_S", 0.0)

    async def slow(transport: Any, peers: Any, stage: int, *rest: Any, **more: Any) -> Any:
        lab.advance()
        for _ in range(3):
            clock.advance(0.9 * pins.IDLE_S)
            for peer in (p for p in lab.peers if p.stage >= stage):
                key = pins.PinKey(peer.stage, StateKind.PARAMETERS, version)
                pin = peer.service.pins._pins[key]
                for _ in iter(lambda pin=pin: pin.used < clock.now(), False):
                    await asyncio.sleep(0)
        return await fetch(transport, peers, stage, *rest, **more)

    monkeypatch.setattr(export, "fetch", slow)
    _, _, fields = await lab.export()
    assert fields["epoch"] == version.epoch
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(version))


async def test_a_version_that_slipped_away_is_given_up_for_the_next_plan(make, monkeypatch) -> None:
    monkeypatch.setattr(export, "FIND_S", 60.0)
    monkeypatch.setattr(export, "LOOK_S", 60.0)
    lab = await make()
    plan = lab.plan
    lab.advance()
    lab.plan = plan  # the others have stepped; the plan of the next epoch is on its way
    asked = asyncio.Event()
    real = donors.Donors.find

    async def find(self: Any, *args: Any) -> Any:
        found = await real(self, *args)
        if not found:
            asked.set()
        return found

    monkeypatch.setattr(donors.Donors, "find", find)
    work = asyncio.ensure_future(lab.export())
    await asked.wait()
    lab.begin()
    _, _, fields = await work
    assert fields["epoch"] == lab.version.epoch
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(lab.version))


async def test_a_stage_lost_under_way_means_a_newer_version_of_all(make, monkeypatch) -> None:
    lab = await make()
    first = lab.version
    monkeypatch.setattr(export, "TRIES", 1)
    monkeypatch.setattr(export, "AT_ONCE", 1)
    fetched: list[tuple[int, int]] = []

    async def restarted(*args: Any, **more: Any) -> Any:
        _, _, stage, _, at, _ = args
        fetched.append((stage, at.epoch))
        if (stage, at) == (2, first):
            lab.advance()
            for peer in lab.peers:
                peer.service.pins._pins.clear()
        return await fetch(*args, **more)

    monkeypatch.setattr(export, "fetch", restarted)
    _, _, fields = await lab.export()
    assert fetched == [(0, 7), (2, 7), (0, 8), (2, 8)]
    assert fields["epoch"] == 8
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(lab.version))


async def test_the_own_stage_comes_from_a_replica_where_it_is_another_version(make) -> None:
    lab = await make()
    lab.here = Version(6, "ef" * 16)
    with pytest.raises(NetworkFault, match="1 of 3 stages") as e:
        await lab.export()
    assert e.value.what.endswith("\nstage 1:\n  this peer: holds epoch 6")
    await lab.host(1)
    _, _, fields = await lab.export()
    assert fields["epoch"] == 7
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(lab.version))


async def test_tensors_without_the_digest_of_the_plan_are_not_believed(make, monkeypatch) -> None:
    lab = await make()
    monkeypatch.setattr(export, "TRIES", 1)
    monkeypatch.setattr(export, "VERSIONS", 1)
    liar = next(p for p in lab.peers if p.stage == 2)
    spoilt = lab.tensors(2, Version(99))
    monkeypatch.setattr(liar, "describe", lambda *_: (lab.version, spoilt))
    with pytest.raises(NetworkFault, match="offers digest"):
        await lab.export()
    assert liar.peer in {peer for peer, _, _ in lab.me.faults}
    assert lab.nothing_left()


async def test_at_epoch_0_the_manifest_names_the_weights(make) -> None:
    lab = await make()
    lab.version = lab.here = Version(0)
    for peer in lab.peers:
        peer.at = lab.version
    named = [f"blake3:{digest(lab.tensors(stage, lab.version))}" for stage in range(3)]
    lab.manifest = amended(lab.manifest, {"model.weights": [*named[:2], f"blake3:{'0' * 64}"]})
    lab.begin()
    with pytest.raises(NetworkFault, match=r"offers digest .* the swarm has 000000000000"):
        await lab.export()
    lab.manifest = amended(lab.manifest, {"model.weights": named})
    await lab.export()
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(lab.version))


# ----------------------------------------------------------- when something is missing


async def test_a_missing_stage_is_named_with_its_peers_and_why(make) -> None:
    lab = await make()
    lost = next(p for p in lab.peers if p.stage == 2)
    ends = next(p for p in lab.peers if p.stage == 0)
    ends.at = Version(8, "cd" * 16)
    await lab.net.kill(lost.peer)
    with pytest.raises(NetworkFault) as e:
        await lab.export()
    said = e.value.what.splitlines()
    assert said[0] == "2 of 3 stages cannot be had at epoch 7 (lineage abababab)"
    assert said[1:] == [
        "the ends:",
        f"  {ends.peer[-6:]}: holds another version",
        "stage 2:",
        f"  {lost.peer[-6:]}: cannot be reached",
    ]
    assert "tutti peers" in e.value.next_step
    assert lab.nothing_left()


async def test_a_peer_without_a_plan_says_what_it_waits_for(make) -> None:
    lab = await make()
    lab.plan = None
    lab.waits = "an ends peer"
    with pytest.raises(NetworkFault, match="follows no plan yet: it waits for an ends peer"):
        await lab.export()


async def test_a_place_that_will_not_do_is_told_before_anything_is_asked(make) -> None:
    lab = await make(OWN_TOKENIZER)
    lab.out.mkdir(parents=True)
    (lab.out / "letter.txt").write_text("mine")
    with pytest.raises(Refused, match="not an earlier export"):
        await lab.export()
    assert [p.name for p in lab.out.iterdir()] == ["letter.txt"]


# ----------------------------------------------------------- goes on after a failure


async def test_another_donor_goes_on_where_one_died(make) -> None:
    lab = await make()
    await lab.host(2)
    lab.begin()
    next(p for p in lab.peers if p.stage == 2).serves = 1
    await lab.export()
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(lab.version))
    assert lab.me.faults == []


async def test_the_next_export_fetches_only_what_is_missing(make, monkeypatch) -> None:
    lab = await make()
    monkeypatch.setattr(export, "TRIES", 1)
    monkeypatch.setattr(export, "VERSIONS", 1)
    monkeypatch.setattr(export, "AT_ONCE", 1)
    ends, block = (next(p for p in lab.peers if p.stage == s) for s in (0, 2))
    block.serves = 3
    with pytest.raises(NetworkFault, match="stage 2"):
        await lab.export()
    assert lab.nothing_left()
    assert ends.sent == 3, "all of its tensors"
    kept = lab.config.export_dir(lab.manifest.run_id)
    assert len(list((kept / "stage-0").glob("*.piece"))) == 3
    assert len(list((kept / "stage-2").glob("*.piece"))) == 3
    again = await lab.host(2)
    lab.begin()
    await lab.export()
    assert ends.sent == 3, "what was whole before is not asked for again"
    assert again.sent == len(lab.tensors(2, lab.version)) - 3
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(lab.version))
    assert not kept.exists()


async def test_a_full_home_keeps_no_pieces_and_the_export_goes_on(make, monkeypatch) -> None:
    lab = await make()
    kept = lab.config.export_dir(lab.manifest.run_id)

    def full(self: Any, *_: Any) -> None:
        if self.directory is not None:
            raise OutOfResources("no room to keep fetched state", "")

    monkeypatch.setattr(export.Partial, "keep", full)
    await lab.export()
    assert same(load_file(lab.out / "model.safetensors"), lab.whole(lab.version))
    assert not kept.exists()


async def test_a_home_with_little_room_keeps_no_pieces(make, monkeypatch) -> None:
    lab = await make()
    usage = SimpleNamespace(total=1 << 40, free=128 << 20)
    kept: list[Path | None] = []
    real = export.Partial.keep

    def keep(self: Any, *args: Any) -> None:
        kept.append(self.directory)
        real(self, *args)

    monkeypatch.setattr(export.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(export.Partial, "keep", keep)
    monkeypatch.setattr(export.Exporter, "_size", lambda self, stage: 32 << 20)
    await lab.export()
    assert set(kept) == {None}
    usage.free = 192 << 20
    await lab.export()
    assert {path.name for path in kept if path} == {"stage-0", "stage-2"}


async def test_an_export_that_is_ended_leaves_nothing(make, monkeypatch) -> None:
    lab = await make()
    held = asyncio.Event()
    under_way: set[int] = set()

    async def waits(transport: Any, peers: Any, stage: int, *_: Any, **__: Any) -> Any:
        under_way.add(stage)
        held.set()
        try:
            await asyncio.Event().wait()
        finally:
            under_way.discard(stage)

    monkeypatch.setattr(export, "fetch", waits)
    monkeypatch.setattr(export, "SHOW_S", 0.0)
    async with aclosing(lab.exporter().run()) as words:
        async for kind, _, _ in words:
            assert kind == "export-progress"
            if held.is_set():
                break
        assert [p.name[:7] for p in lab.out.parent.iterdir()] == [".model."]
    assert not under_way
    assert lab.nothing_left()


async def test_an_export_that_fails_fetches_nothing_more(make, monkeypatch) -> None:
    lab = await make()
    monkeypatch.setattr(export, "VERSIONS", 1)
    monkeypatch.setattr(export, "TRIES", 1)
    both = asyncio.Barrier(2)
    under_way: set[int] = set()

    async def one_fails(transport: Any, peers: Any, stage: int, *_: Any, **__: Any) -> Any:
        under_way.add(stage)
        try:
            await both.wait()
            if stage == 2:
                raise export.NoDonor("it", {PeerId("donor"): "broke"})
            await asyncio.Event().wait()
        finally:
            under_way.discard(stage)

    monkeypatch.setattr(export, "fetch", one_fails)
    with pytest.raises(NetworkFault, match="stage 2:\n  donor: broke"):
        await lab.export()
    assert not under_way
    assert lab.nothing_left()


# ----------------------------------------------------------- progress


async def test_progress_counts_stages_and_bytes(make, monkeypatch) -> None:
    lab = await make()
    monkeypatch.setattr(export, "SHOW_S", 0.0)
    told: list[News] = []
    async with aclosing(lab.exporter().run()) as words:
        async for word in words:
            told.append(word)
    figures = [
        fields for kind, _, fields in told if kind == "export-progress" and fields["bytes_total"]
    ]
    total = sum(t.numel() * 4 for s in (0, 2) for t in lab.tensors(s, lab.version).values())
    assert {f["bytes_total"] for f in figures} == {total}
    assert {f["stages"] for f in figures} == {3}
    for name in ("bytes", "stages_done"):
        seen = [f[name] for f in figures]
        assert seen == sorted(seen)
    assert figures[0]["stages_done"] >= 1, "the own stage needs no fetching"
    assert figures[-1]["bytes"] <= total


def test_the_rate_is_that_of_the_last_seconds() -> None:
    progress = ExportProgress(total=1000)
    assert progress.figures(0.0)["bytes_per_s"] == 0
    for second in range(1, 21):
        progress.received[1] = 100 * min(second, 10)
        figures = progress.figures(float(second))
        if second == 10:
            assert figures["bytes_per_s"] == 100
    assert figures["bytes_per_s"] == 0
    assert figures["bytes"] == 1000


# ----------------------------------------------------------- the card


async def test_the_export_has_a_card_of_its_version(make) -> None:
    lab = await make()
    await lab.export()
    card = (lab.out / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "transformers"
    assert "| Version | epoch 7 of " in card
    assert f"lineage `{'ab' * 16}`" in card
    assert "12,345" in card
    assert "2.5000 nats" in card
    assert "2.7500 nats" in card
    assert lab.manifest.run_id in card
    lab.advance()
    await lab.export()
    assert "| Version | epoch 8 of " in (lab.out / "README.md").read_text()
