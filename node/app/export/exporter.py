"""One version of the whole model, gathered from the swarm and written as a directory.

Enters: the operator's request, the newest plan, the peers that may have the missing stages and the
tokenizer. Leaves: news of the progress, a directory. Never: tensors of two versions, bytes that do
not have the digest of the plan or the hash of the manifest.

The plan names a version and the digest of each stage. All stages are asked for at once and kept at
their donors (:mod:`node.checkpoint.donors`), then fetched one after the other and written as they
come, while the swarm trains on. Fetched pieces stay on the disk until the export is whole. The next
export goes on with them, if the swarm still gives that version.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from node.app.assembly import Assembled
from node.app.export.merging import drawn_base, merge_adapters
from node.app.export.model_card import Result, model_card, source_in
from node.app.run_files import RunFiles
from node.checkpoint.donors import RENEW_S, Donors
from node.checkpoint.errors import NoDonor
from node.checkpoint.fetch import Partial, fetch
from node.checkpoint.run_file import fetch_file
from node.checkpoint.state import WIRE, StateKind
from node.config import NodeConfig
from node.core.errors import LocalFault, NetworkFault, OutOfResources, Refused, UsageFault
from node.core.ids import PeerId, short, stage_name
from node.core.journey import UNKNOWN, Losses, Plan, Version
from node.core.numbers import human, several
from node.core.tasks import Tasks, together
from node.data.settings import Places
from node.data.tokenizer import open_tokenizer
from node.data.tokenizer_files import TokenizerFiles, named_files
from node.model.export import Export
from node.model.extras import Extras
from node.model.files import MODEL_FILES, TOKENIZER
from node.model.pretrained import Weights
from node.model.settings import DIGEST
from node.model.shapes import base_shapes, parameter_shapes
from node.transport.port import TransportPort
from node.wire.tensors import digest, nbytes_of
from protos.control_pb2 import ExportRequest

T = TypeVar("T")
SHOW_S = 0.5
"""Seconds between two reports of the progress."""
RATE_S = 5.0
"""Seconds over which the rate is measured."""
FIND_S = 30.0
"""Longest wait for a version that every stage gives."""
LOOK_S = 1.0
"""Seconds between two questions for a version, while no new plan comes."""
POLL_S = 0.05
"""Seconds between two looks at whether a new plan has come."""
TRIES = 5
"""Attempts to fetch a stage."""
RETRY_S = 1.0
"""Pause after the first attempt that failed."""
VERSIONS = 3
"""Versions that an export tries: donors may lose one while it is fetched."""
AT_ONCE = 2
"""Stages in memory at once."""
ASKED = 16
"""Peers that are asked for the tokenizer, one after the other."""
SAID = 6
"""Most stages, and most peers of each, that an error lists."""

_AGAIN = "see  tutti status , and give the same command again"

News = tuple[str, str, dict[str, Any]]
"""Kind, sentence and figures of one event."""


@dataclass
class ExportProgress:
    """Progress of an export."""

    doing: str = "looking for a version that every stage has"
    stages: int = 0
    done: int = 0
    """Stages written, of ``stages``."""
    received: dict[int, int] = field(default_factory=dict)
    """Bytes here of each stage that is fetched."""
    total: int = 0
    """Bytes of all stages that are fetched."""
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def figures(self, now: float) -> dict[str, Any]:
        """Figures at monotonic time ``now``; the rate is that since the oldest call in the last
        :data:`RATE_S` seconds."""
        here = sum(self.received.values())
        self._seen.append((now, here))
        while now - self._seen[0][0] > RATE_S:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = 0.0
        if now > since:
            rate = (here - before) / (now - since)
        return {
            "stages": self.stages,
            "stages_done": self.done,
            "bytes": here,
            "bytes_total": self.total,
            "bytes_per_s": rate,
        }


@dataclass
class _Common:
    """A version that every stage gives: the plan that starts from it, donors of the stages that are
    elsewhere, and the tensors of the own stage until they are written."""

    plan: Plan
    donors: Mapping[int, Donors]
    own: Mapping[str, Tensor]


class _StageLost(Exception):
    """No peer gives a stage of the version any more."""

    def __init__(self, donors: Donors) -> None:
        super().__init__()
        self.donors = donors


class Exporter:
    """One export of the run that ``a`` takes part in. ``hosts(stage)`` lists other peers that host
    a stage, as the directory shows them; it knows more than the plan when members are gone.
    ``losses``: the newest that this peer has heard of, for a plan that knows none."""

    def __init__(
        self,
        a: Assembled,
        transport: TransportPort,
        config: NodeConfig,
        hosts: Callable[[int], Iterable[PeerId]],
        request: ExportRequest,
        *,
        losses: Losses = UNKNOWN,
    ) -> None:
        self._losses = losses
        self._a = a
        self._transport = transport
        self._config = config
        self._hosts = hosts
        self._request = request
        self._files = RunFiles(config, a.manifest, a.tokenizer)
        self._notes: list[str] = []
        """Differences between this export and the model that the run began from."""
        self._progress = ExportProgress()
        self._partials: dict[int, Partial] = {}
        self._disk = ThreadPoolExecutor(1, "export")
        """The one thread that writes: a write under way ends before anything is removed."""
        self._tasks = Tasks("export")

    @property
    def _merged(self) -> bool:
        """True if adapters are added to the weights that they were trained beside."""
        return self._request.merge and self._a.manifest.model.adapter > 0

    async def run(self) -> AsyncGenerator[News, None]:
        """Yield news of the progress, at last "exported" with the figures of the result. Ended
        early, by an error or by its caller, it leaves no directory.

        Raises Refused, UsageFault or OutOfResources for a place that an export may not take, and
        NetworkFault, which lists the missing stages or names the tokenizer, when no peer gives
        them.
        """
        job = self._tasks.spawn(self._export(), "job")
        loop = asyncio.get_running_loop()
        try:
            while not (await asyncio.wait((job,), timeout=SHOW_S))[0]:
                yield "export-progress", self._progress.doing, self._progress.figures(loop.time())
            yield job.result()
        finally:
            await self._tasks.close()
            self._disk.shutdown(wait=False)

    async def _export(self) -> News:
        m = self._a.manifest
        shapes = {s: self._shapes(s) for s in range(m.pipeline.stages + 1)}
        stages = [stage for stage, of in shapes.items() if of]
        self._progress.stages = len(stages)
        self._check_request()
        out = self._new()
        # An unsuitable directory is refused before anything is fetched.
        await self._blocking(self._check_source, out.directory)
        await self._blocking(out.check)
        files = await self._all_files()
        await self._blocking(out.check_extras, _extras(files, "", ""))
        versions = 0
        while True:
            common = await self._common(stages)
            versions += 1
            try:
                await self._gather(common, out, stages)
                return await self._publish(common.plan, out, files)
            except _StageLost as e:
                lost = e.donors
                self._progress.doing = f"{stage_name(lost.stage)} was lost; beginning again"
            finally:
                await self._blocking(out.discard)
            if versions == VERSIONS:
                raise self._missing(common.plan, {lost.stage: lost})
            out = self._new()

    def _check_request(self) -> None:
        """Raise UsageFault for options that this run cannot have."""
        adapter = self._a.manifest.model.adapter
        if self._request.merge and not adapter:
            raise UsageFault("--merge, and this run trains no adapters", "leave  --merge  away")
        if self._request.gguf and adapter and not self._merged:
            raise UsageFault(
                "--gguf needs whole weights, and this run trains adapters", "add  --merge"
            )
        if self._request.gguf:
            from node.model.gguf_file import check_library

            check_library()

    def _check_source(self, directory: Path) -> None:
        """Raise Refused for the directory that the run began from: peers are given its weights,
        and adapters are nothing without them. Blocks on the disk."""
        source = self._config.places(self._a.manifest.run_id).weights
        with contextlib.suppress(OSError):
            if source and os.path.samefile(source, directory):
                raise Refused(
                    f"{directory} holds the model that the run began from",
                    "choose a new directory",
                )

    def _new(self) -> Export:
        m = self._a.manifest
        written = m.model
        if self._merged:
            written = replace(m.model, adapter=0)
        directory = Path(self._request.directory)
        return Export(directory, written, m.optimizer.parameters, gguf=self._request.gguf)

    async def _publish(self, plan: Plan, out: Export, files: TokenizerFiles) -> News:
        m = self._a.manifest
        version = plan.base
        self._progress.doing = f"writing {out.directory}"
        source = await self._blocking(source_in, self._config.places(m.run_id).weights)
        source = replace(source, repository=m.model.base or source.repository)
        loss = plan.loss or self._losses.training
        held_out = plan.loss_val or self._losses.held_out
        result = Result(version, plan.tokens, loss, held_out, plan.reference)
        adapters = m.model.adapter > 0 and not self._merged
        tokenizer = files.tokenizer_json is not None
        base = ""
        if adapters:
            base = await self._blocking(self._base_name, source.repository)
        card = model_card(m, result, source, tokenizer=tokenizer, adapters=adapters)
        extras = _extras(files, card, base)
        size = await self._blocking(out.publish, extras)
        await self._blocking(self._forget)
        text = (
            f"wrote {out.directory} from {_said(version)}: all "
            f"{several(self._progress.stages, 'stage')}, {human(size)}"
        )
        fields = {
            "directory": str(out.directory),
            "run_id": m.run_id,
            "epoch": version.epoch,
            "lineage": version.lineage,
            "stages": self._progress.stages,
            "bytes": size,
            "tokens": plan.tokens,
            "loss": loss,
            "loss_val": held_out,
            "adapter": adapters,
            "tokenizer": tokenizer,
            "base": base,
            "gguf": self._request.gguf,
            "notes": [*self._notes, *out.notes],
        }
        return "exported", text, fields

    async def _blocking(self, work: Callable[..., T], *args: Any) -> T:
        """Call ``work`` on the thread that writes."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *args)

    def _shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        m = self._a.manifest
        return parameter_shapes(m.model, m.pipeline.stages, stage)

    # ----------------------------------------------------------- the tokenizer

    async def _tokenizer(self) -> bytes | None:
        """Find the run's tokenizer.json, as the manifest names it. Returns None for an export
        without one.

        Raises NetworkFault where it is neither here nor at another peer, UsageFault where it is not
        here and the manifest names no hash to check another peer's copy by, and as
        :func:`open_tokenizer` for a file that the request names.
        """
        m = self._a.manifest
        request = self._request
        if request.without_tokenizer:
            return None
        wanted = m.data.tokenizer_sha256
        if request.tokenizer:
            named = Places(tokenizer=request.tokenizer)
            try:
                return (await asyncio.to_thread(open_tokenizer, m.data, named)).to_json()
            except LocalFault as e:
                away = "leave  --tokenizer  away, and the run's own is taken, from another peer"
                raise type(e)(e.what, f"{away} if it is not here") from e
        if self._a.tokenizer is not None:
            return self._a.tokenizer.to_json()
        if wanted and (found := await asyncio.to_thread(self._files.read, wanted)) is not None:
            return found
        if wanted:
            return await self._fetched(wanted)
        try:
            places = self._config.places_of(m)
            return (await asyncio.to_thread(open_tokenizer, m.data, places)).to_json()
        except UsageFault as e:
            raise UsageFault(
                f"{e.what}. The manifest names no hash of it, so a copy that another peer sends "
                "could not be checked",
                _tokenizer_step("export at a peer that hosts the ends ( tutti peers )"),
            ) from e

    async def _all_files(self) -> TokenizerFiles:
        """The tokenizer and the other files that the manifest names. Raises as
        :meth:`_tokenizer`, and NetworkFault for another file that nobody gives."""
        data = self._a.manifest.data
        tokenizer: bytes | None = None
        try:
            tokenizer = await self._tokenizer()
        except (NetworkFault, UsageFault) as e:
            if not self._a.manifest.model.adapter or self._request.tokenizer or self._merged:
                raise
            # Adapters can be used without: the base model has the same tokenizer.
            self._notes.append(f"the export has no tokenizer: {e.what}")
        found: dict[str, bytes] = {}
        for name, sha256 in named_files(data).items():
            if tokenizer is None and name not in MODEL_FILES:
                continue
            content = await asyncio.to_thread(self._given, name, sha256)
            if content is None:
                content = await self._file(name, sha256)
            found[name] = content
        files = TokenizerFiles(found, tokenizer)
        await asyncio.to_thread(files.check)
        return files

    def _given(self, name: str, sha256: str) -> bytes | None:
        """A file that is on the disk here. Blocks on the disk."""
        if self._request.tokenizer:
            beside = Path(self._request.tokenizer).parent / name
            with contextlib.suppress(OSError):
                content = beside.read_bytes()
                if hashlib.sha256(content).hexdigest() == sha256:
                    return content
        return self._files.read(sha256)

    async def _file(self, name: str, sha256: str) -> bytes:
        """A file that the manifest names, from another peer. Raises NetworkFault."""
        self._progress.doing = f"fetching {name}"
        stages = range(self._a.manifest.pipeline.stages + 1)
        peers = [peer for stage in stages for peer in sorted(self._candidates(stage))]
        try:
            content = await fetch_file(self._transport, peers[:ASKED], name, sha256)
        except NoDonor as e:
            raise NetworkFault(
                f"{name} (sha256 {sha256[:16]}…), which came with the run's model, is not here, "
                f"and no peer gave it:{_listed(e.reasons)}",
                "name the tokenizer.json in the model's directory:  tutti export DIR --tokenizer "
                "MODEL/tokenizer.json ; or wait for the owner's peer ( tutti peers )",
            ) from e
        with contextlib.suppress(LocalFault):  # without a copy it is fetched again the next time
            await asyncio.to_thread(self._files.keep_all, {name: content})
        return content

    async def _fetched(self, sha256: str) -> bytes:
        name = self._a.manifest.data.tokenizer
        self._progress.doing = f"fetching the tokenizer {name}"
        stages = range(self._a.manifest.pipeline.stages + 1)
        # The ends need it; other peers may have a copy.
        peers = [peer for stage in stages for peer in sorted(self._candidates(stage))]
        asked = peers[:ASKED]
        try:
            found = await fetch_file(self._transport, asked, "the tokenizer", sha256)
        except NoDonor as e:
            raise NetworkFault(
                f"the run's tokenizer {name} (sha256 {sha256[:16]}…) is not here, and no peer gave "
                f"it:{_listed(e.reasons)}",
                _tokenizer_step("wait for a peer that hosts the ends ( tutti peers )"),
            ) from e
        with contextlib.suppress(LocalFault):  # without a copy it is fetched again the next time
            await asyncio.to_thread(self._files.keep, found)
        return found

    # ----------------------------------------------------------- a version in common

    async def _common(self, stages: list[int]) -> _Common:
        """The version of the newest plan, kept at donors of every stage. Raises NetworkFault, which
        lists the missing stages, when there is none for :data:`FIND_S` seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + FIND_S
        asked: Plan | None = None
        look = 0.0
        while True:
            plan = self._a.work.plan
            if plan is not None and (plan is not asked or loop.time() >= look):
                common = await self._keep(plan, stages)
                missing = {s: d for s, d in common.donors.items() if not d.found}
                if not missing:
                    return common
                if loop.time() >= until:
                    raise self._missing(plan, missing)
                names = ", ".join(stage_name(s) for s in sorted(missing)[:SAID])
                wait = f"waiting up to {FIND_S:.0f} s for {names}"
                self._progress.doing = f"{wait} at {_said(plan.base)}"
                asked = plan
                look = loop.time() + LOOK_S
            elif plan is None and loop.time() >= until:
                what = "this peer follows no plan yet"
                if waits := self._a.training.waiting_for():
                    what += f": it waits for {waits}"
                raise NetworkFault(what, _AGAIN)
            await asyncio.sleep(POLL_S)

    async def _keep(self, plan: Plan, stages: list[int]) -> _Common:
        """Ask peers of every stage at once to keep the version that the plan starts from."""
        here = self._a.stage.stage
        own = self._own(plan)
        donors: dict[int, Donors] = {}
        for stage in stages:
            if own is None or stage != here:
                shapes = self._shapes(stage)
                smallest = min(shapes, key=lambda name: nbytes_of(shapes[name], WIRE))
                donors[stage] = Donors(self._transport, stage, plan.base, smallest)
        await together(*(d.find(self._candidates(stage, plan)) for stage, d in donors.items()))
        return _Common(plan, donors, own or {})

    def _own(self, plan: Plan) -> Mapping[str, Tensor] | None:
        """Tensors of the stage hosted here at the version that the plan starts from; None where
        they are not here."""
        stage = self._a.stage
        if stage.empty:
            return None
        held = stage.held(plan.epoch, plan.lineage)
        agreed = self._digest(plan, stage.stage)
        if held is None or agreed not in (None, held.digest):
            return None
        return held.parameters

    def _candidates(self, stage: int, plan: Plan | None = None) -> set[PeerId]:
        """Other peers that may have a stage: members that start from the plan's version, and peers
        that the directory shows there."""
        plan = plan or self._a.work.plan
        members = set[PeerId]()
        if plan:
            members = {m.peer for m in plan.stage(stage) if m.current}
        return (members | {*self._hosts(stage)}) - {self._transport.peer_id}

    def _digest(self, plan: Plan, stage: int) -> str | None:
        """Digest of a stage at the version that the plan starts from: the manifest's for the
        weights that the run begins from, else the one the cell has agreed on; None if unknown."""
        m = self._a.manifest.model
        if plan.base == Version(0) and m.weights and not m.adapter:
            return m.weights[stage].removeprefix(DIGEST)
        return plan.digests.get(stage)

    def _missing(self, plan: Plan, missing: Mapping[int, Donors]) -> NetworkFault:
        lines = "\n".join(self._why(donors) for _, donors in sorted(missing.items())[:SAID])
        return NetworkFault(
            f"{len(missing)} of {several(self._progress.stages, 'stage')} cannot be had at "
            f"{_said(plan.base)}\n{lines}",
            "a stage comes back with a peer that has its checkpoint:  tutti start  there ; "
            f"tutti peers  shows who is here; {_AGAIN}",
        )

    def _why(self, donors: Donors) -> str:
        """Reasons why no peer gives a stage at the wanted version."""
        here = self._a.stage
        why = _listed(donors.reasons)
        if donors.stage == here.stage:
            why = f"\n  this peer: holds epoch {here.version.epoch}{why}"
        return f"{stage_name(donors.stage)}:{why or ' no peer hosts it'}"

    # ----------------------------------------------------------- gathering

    async def _gather(self, common: _Common, out: Export, stages: list[int]) -> None:
        """Write every stage, fetched or the own one. Raises _StageLost."""
        sizes = {s: self._size(s) for s in common.donors}
        self._progress.done = len(stages) - len(sizes)
        self._progress.received = {}
        self._progress.total = sum(sizes.values())
        self._progress.doing = f"gathering {_said(common.plan.base)}"
        await self._blocking(out.open)
        if common.own:
            await self._put(out, self._a.stage.stage, common.own)
        common.own = {}
        if self._merged:  # stages that train nothing
            for stage in range(self._a.manifest.pipeline.stages + 1):
                if stage not in stages:
                    await self._put(out, stage, {})
        # The export may be on the same disk, and checkpoints need room too.
        lasting = await self._blocking(self._has_room, 3 * sum(sizes.values()))
        room = asyncio.Semaphore(AT_ONCE)

        async def one(donors: Donors) -> None:
            async with room:
                tensors = await self._fetch(common.plan, donors, lasting)
                await self._put(out, donors.stage, tensors)
            left.discard(donors.stage)
            self._progress.done += 1

        left = set(common.donors)
        keeping = self._tasks.spawn(self._keep_on(common.donors, left), "keep")
        try:
            await together(*(one(donors) for donors in common.donors.values()))
        finally:
            keeping.cancel()

    async def _put(self, out: Export, stage: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the trained tensors of a stage. A merged export gets the sums of the adapters and
        the weights that they were trained beside."""
        if self._merged:
            base = await self._base(stage)
            tensors = await self._blocking(merge_adapters, base, tensors, self._a.manifest.model)
        await self._blocking(out.put, tensors)

    async def _base(self, stage: int) -> Mapping[str, Tensor]:
        """The weights of a stage beside which adapters are trained: from the directory that the
        user named here, else as this peer fetched them once, else from another peer."""
        m = self._a.manifest
        stages = m.pipeline.stages
        if not m.model.weights:
            return await self._blocking(drawn_base, m.model, stages, stage, m.optimizer.parameters)
        if (found := await self._blocking(self._base_here, stage)) is not None:
            return found
        self._progress.doing = f"fetching the weights of {stage_name(stage)}"
        others = (self._candidates(s) for s in range(stages + 1) if s != stage)
        donors = [*sorted(self._candidates(stage)), *sorted(set().union(*others))]
        try:
            snapshot = await fetch(
                self._transport,
                list(dict.fromkeys(donors))[:ASKED],
                stage,
                StateKind.BASE,
                Version(0),
                base_shapes(m.model, stages, stage),
                expected_digest=m.model.weights[stage].removeprefix(DIGEST),
            )
        except NoDonor as e:
            raise NetworkFault(
                f"the weights of {stage_name(stage)} that the run began from are not here, and no "
                f"peer gave them:{_listed(e.reasons)}",
                f"export where the model is:  tutti start --weights DIR ; {_AGAIN}",
            ) from e
        return snapshot.tensors

    def _base_here(self, stage: int) -> Mapping[str, Tensor] | None:
        """The weights of a stage that are on the disk here, None where there are none. Blocks on
        the disk."""
        m = self._a.manifest
        wanted = m.model.weights[stage]
        hosted = self._a.stage
        if stage == hosted.stage and hosted.frozen is not None and not hosted.empty:
            whole = {name: tensor.detach().cpu() for name, tensor in hosted.frozen.items()}
            if DIGEST + digest(whole) == wanted:
                return whole
        named = self._config.places(m.run_id).weights
        for place in (named, str(self._config.base_dir(m.run_id, stage))):
            if place and Path(place).is_dir():
                with contextlib.suppress(LocalFault):  # another model, or a part of it
                    found = Weights(Path(place), m.optimizer.parameters)
                    return found.verified(m.model, m.pipeline.stages, stage, wanted)
        return None

    def _base_name(self, repository: str) -> str:
        """Name or directory of the model beside which adapters were trained; "" for unknown, with
        a note. Blocks on the disk."""
        m = self._a.manifest
        here = self._config.places(m.run_id).weights
        known = self._request.base or repository
        if known or not m.model.weights:
            return known
        if here and Path(here).is_dir():
            return str(Path(here).absolute())
        self._notes.append(
            "adapter_config.json names no base model, because its name is not known here: export "
            "again with  --base NAME , or load it with  peft.PeftModel.from_pretrained(base, DIR)"
        )
        return ""

    async def _keep_on(self, donors: Mapping[int, Donors], left: set[int]) -> None:
        """Keep the version at the donors of the stages that are ``left``."""
        while True:
            await together(*(donors[stage].renew() for stage in left))
            await asyncio.sleep(RENEW_S)

    async def _fetch(self, plan: Plan, donors: Donors, lasting: bool) -> Mapping[str, Tensor]:
        """The tensors of one stage. Raises _StageLost when no peer gives them any more."""
        stage = donors.stage
        kept = None
        if lasting:
            kept = self._config.export_dir(self._a.manifest.run_id) / f"stage-{stage}"
        partial = self._partials.setdefault(stage, Partial(kept, lasting=lasting))

        def progress(done: int, total: int) -> None:
            self._progress.received[stage] = done

        reasons: Mapping[PeerId, str] = {}
        for tried in range(1, TRIES + 1):
            try:
                found = await fetch(
                    self._transport,
                    donors.found,
                    stage,
                    StateKind.PARAMETERS,
                    plan.base,
                    self._shapes(stage),
                    progress=progress,
                    expected_digest=self._digest(plan, stage),
                    settings=self._a.work.engines.store.settings,
                    partial=partial,
                )
                self._progress.received[stage] = self._size(stage)
                return found.tensors
            except NoDonor as e:
                reasons = e.reasons
            except OutOfResources:
                await self._blocking(self._forget)
                partial = self._partials[stage] = Partial()
            if tried < TRIES:
                await asyncio.sleep(RETRY_S * tried)
                await donors.find(self._candidates(stage, plan))
        donors.reasons |= reasons
        raise _StageLost(donors)

    def _size(self, stage: int) -> int:
        """Bytes of a stage on the wire."""
        return sum(nbytes_of(shape, WIRE) for shape in self._shapes(stage).values())

    # ----------------------------------------------------------- pieces on the disk

    def _has_room(self, nbytes: int) -> bool:
        """Return True if the disk of the home has ``nbytes`` free."""
        try:
            return shutil.disk_usage(self._config.home).free >= nbytes
        except OSError:
            return False

    def _forget(self) -> None:
        """Remove the pieces that were kept."""
        shutil.rmtree(self._config.export_dir(self._a.manifest.run_id), ignore_errors=True)


def _extras(files: TokenizerFiles, card: str, base: str) -> Extras:
    """Content of the export beside its tensors."""
    given = dict(files.files)
    if files.tokenizer_json is not None:
        given[TOKENIZER] = files.tokenizer_json
    return Extras(
        files=given,
        bos=files.bos_id,
        eos=files.eos_ids,
        pad=files.pad_id,
        words=files.special_tokens,
        template=files.chat_template,
        card=card,
        base=base,
    )


def _said(version: Version) -> str:
    said = f"epoch {version.epoch}"
    if version.lineage:
        said += f" (lineage {version.lineage[:8]})"
    return said


def _listed(reasons: Mapping[PeerId, str]) -> str:
    """Reasons why several peers gave nothing, a line each."""
    lines = [f"\n  {short(peer)}: {reason}" for peer, reason in list(reasons.items())[:SAID]]
    if len(reasons) > SAID:
        lines.append(f"\n  and {len(reasons) - SAID} more")
    return "".join(lines)


def _tokenizer_step(wait: str) -> str:
    return (
        f"{wait}, or name a copy with  tutti export DIR --tokenizer FILE , or leave it out with  "
        "--no-tokenizer"
    )
