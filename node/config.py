"""The settings of this peer, merged from everywhere, and the places of its files. The reader of the
environment.

No manifest can change them. Precedence: flags, then ``TUTTI_*``, then ``--config``, then the user's
``config.toml``, then the defaults written in each package's ``settings.py``.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import re
import shlex
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.availability.settings import AvailabilitySettings
from node.checkpoint.archive.address import Address
from node.checkpoint.archive.machine import Every
from node.checkpoint.settings import PLACE, PLACE_SAYS, CheckpointSettings
from node.core.errors import LocalFault, Refused, TooNew, UsageFault, writing
from node.core.home import control_socket, expanded, home_named, user_dir
from node.core.ids import PeerId, is_cell
from node.core.interrupts import held
from node.core.tables import setting, settings_of, unknown
from node.data.settings import NO_PLACES, Places
from node.dht.settings import DirectorySettings
from node.identity.invites import Invite, within_limits
from node.identity.keys import Identity
from node.manifest import Manifest, read_manifest, toml_entry
from node.pipeline.settings import PipelineLimits
from node.reach.settings import ReachSettings
from node.transport.settings import TransportSettings

EXAMPLE = """name = "anna-4090"
threads = 8

[transport]
p2p_port = 31337
"""
"""A file of settings."""
_RUN = re.compile(r"[0-9a-f]{12}")
_MANIFEST_AGAIN = (
    "put it back with  tutti start FILE  and a copy of it, or join again with a "
    "fresh invite:  tutti join INVITE"
)
MOVED = "TUTTI_MOVED"
"""Left by a daemon for the fresh image of itself: the stage it changes to, "-" for a change of its
cell; and behind a space the id of its run."""
_MOVED = re.compile(r"(-|[0-9]{0,4})( [0-9a-f]{64})?")
LEAST_DATA = 1 << 27
"""Bytes; a stream of data reads several pieces by turns."""
_SIZE = r"[0-9]+(\.[0-9]+)?\s*([KMGT]i?)?B?"
_RIGHTS = "check the disk and the rights of --home"
SECTIONS: dict[str, type] = {
    "transport": TransportSettings,
    "reach": ReachSettings,
    "directory": DirectorySettings,
    "checkpoint": CheckpointSettings,
    "limits": PipelineLimits,
    "availability": AvailabilitySettings,
}
SHORT_NAMES = {
    "listen": "transport.host",
    "p2p_port": "transport.p2p_port",
    "grpc_port": "transport.grpc_port",
    "announce": "transport.announce",
    "force_tunnel": "transport.force_tunnel",
    "relay": "reach.relay",
    "max_up": "transport.max_up",
    "max_down": "transport.max_down",
    "idle_only": "availability.idle_only",
    "hours": "availability.hours",
    "max_load": "availability.max_load",
}
"""Names in flags and the environment for settings that people touch often: TUTTI_LISTEN is
transport.host."""


@dataclass(frozen=True)
class NodeSettings:
    """The knobs of one peer that belong to no package."""

    name: str = setting(
        "",
        "Human name; empty: derived from the identity.",
        pattern=r"[\w .-]{0,40}",
        says="at most 40 letters, digits, spaces, dots, dashes",
    )
    role: str = setting(
        "auto", "auto | ends | stage | rendezvous.", choices=("auto", "ends", "stage", "rendezvous")
    )
    stage: str = setting(
        "auto",
        "Block stage to host, or auto: the one that needs a peer most.",
        pattern=r"auto|[1-9][0-9]{0,3}",
        says='"auto" or the number of a block stage, 1 or more',
    )
    may_move: bool = setting(
        True,
        "Whether the swarm may ask this peer to host another stage; said of a peer whose stage was "
        "named, it holds there too.",
    )
    device: str = setting(
        "auto",
        "auto | cpu | cuda | cuda:N.",
        pattern=r"auto|cpu|cuda(:[0-9]{1,2})?",
        says="auto, cpu, cuda or cuda:N",
    )
    threads: int = setting(
        0,
        "CPU threads of a device; 0: all cores that the system lets this process keep busy, shared "
        "between the devices.",
        least=0,
        most=1024,
    )
    kernels: str = setting(
        "auto",
        "auto | eager | compile | liger: what computes the layers and the loss. eager: torch's own "
        "operations; compile: torch.compile; liger: the package liger-kernel. auto: on a GPU the "
        "fastest of these by measurement at the start, on the CPU eager.",
        choices=("auto", "eager", "compile", "liger"),
    )
    local_devices: int = setting(
        1,
        "Devices of this machine that hold the stage together, by tensor parallelism: so many "
        "GPUs, or processes on the CPU.",
        least=1,
        most=64,
    )
    memory: str = setting(
        "90%",
        "Most memory of the device to use: a share of it, or a size. Of a GPU no more is taken "
        "than is free at the start, of main memory no more than other daemons of this machine "
        "leave.",
        pattern=rf"(100|[1-9]?[0-9])%|{_SIZE}",
        says='a share such as "80%" or a size such as "20GiB"',
    )
    reserve: str = setting(
        "0",
        "Of that memory, what is left to others, such as a desktop that shows more windows later: "
        "a size.",
        pattern=_SIZE,
        says='a size such as "2GiB", 0 for none',
    )
    nice: int = setting(
        10,
        "Added to the process's niceness, so that the machine's owner feels the daemon little; 0 "
        "for a machine of its own.",
        least=0,
        most=19,
    )
    swarm: str = setting("", "Path of the swarm.toml to run; empty: the one used last.")
    data: str = setting(
        "",
        "Where this peer keeps the data of the run: the file, or a directory that holds it; empty: "
        "where it was found last, else the path in the manifest.",
    )
    data_hosts: tuple[str, ...] = setting(
        (),
        "Hosts of this machine or the LAN from which a run's data may be fetched: names, "
        'addresses, networks ("nas.lan", "10.0.0.7:8000", "10.0.0.0/8"). Public ones always may; '
        "of a run of your own the host in its manifest may.",
    )
    data_disk: int = setting(
        8 << 30,
        "Most bytes of a stream of data to keep on this disk.",
        least=LEAST_DATA,
        most=1 << 50,
    )
    max_disk: str = setting(
        "0",
        "Most bytes that streamed data and checkpoints of a run take on this disk together: a "
        "size, 0 for no cap. Data takes at most half of it, and no more than data_disk; "
        "checkpoints have the rest. A model's own files, tokenised text and logs are not counted.",
        pattern=_SIZE,
        says='a size such as "50GiB", 0 for no cap',
    )
    tokenizer: str = setting("", "Where it keeps the run's tokenizer.json, in the same way.")
    weights: str = setting(
        "",
        "Directory of the model that the run begins from; empty: where it was found last, else its "
        "stage is fetched from other peers.",
    )
    restore: str = setting(
        "",
        "An archive of checkpoints (checkpoint.to of some peer) from which this peer takes its "
        "stage back at its start, unless newer checkpoints are here; empty for none.",
        pattern=PLACE,
        says=PLACE_SAYS,
    )
    join: tuple[str, ...] = setting(
        (), 'Invites ("tutti2...") and multiaddrs ("/ip4/...") to start from.'
    )
    admission: str = setting(
        "",
        "Admission token of a private swarm in hex, when the invite does not carry it.",
        pattern=r"([0-9a-fA-F]{2})*",
        says="the token's bytes in hex",
    )
    metrics_port: int = setting(
        0, "TCP port of the metrics page on loopback; 0 a free one, -1 none.", least=-1, most=65535
    )
    log_format: str = setting(
        "auto",
        "text | json: one format for all that a daemon prints. auto: text.",
        choices=("auto", "text", "json"),
    )
    log_level: str = setting(
        "info",
        "Least level shown on stderr; the event file has everything.",
        choices=("debug", "info", "warning", "error"),
    )
    record: str = setting(
        "",
        "File in which the daemon records the events of its state machines, for tutti replay; "
        "empty: none. An existing file is kept, and a number added to the name.",
    )
    tensorboard: str = setting(
        "",
        "Directory in which the daemon writes the curves of its run for TensorBoard; empty: none. "
        "It needs the package tensorboard.",
    )


@dataclass(frozen=True)
class NodeConfig:
    """The settings of one peer and the places of its files."""

    home: Path
    node: NodeSettings = field(default_factory=NodeSettings)
    transport: TransportSettings = field(default_factory=TransportSettings)
    reach: ReachSettings = field(default_factory=ReachSettings)
    directory: DirectorySettings = field(default_factory=DirectorySettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    limits: PipelineLimits = field(default_factory=PipelineLimits)
    availability: AvailabilitySettings = field(default_factory=AvailabilitySettings)
    moved: str = ""
    """What :data:`MOVED` says: the stage that this process has changed to since it was started, 0
    for the ends, or "-" for a change of its cell; "" for neither."""
    moved_run: str = ""
    """Id of the run in which it has changed; "" for none, or where that is not known."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Setting to where its value came from: "--p2p-port", "TUTTI_P2P_PORT", a file. Absent: built
    in."""
    flags: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The ``flags`` that these were loaded with."""

    @classmethod
    def load(
        cls, flags: Mapping[str, Any], environ: Mapping[str, str] | None = None
    ) -> "NodeConfig":
        """Merge flags, environment, files and defaults.

        ``flags``: setting ("role", "transport.host") or short name ("listen") to value; None is
        "not given". Two are special: ``home`` (directory of this peer's files) and ``config`` (a
        TOML file). ``environ`` replaces the process's environment in tests. Raises UsageFault
        naming the setting, its value and where that came from.
        """
        env = environ
        if env is None:
            env = os.environ
        given = {k: v for k, v in flags.items() if v is not None}
        explicit = home_named(given.pop("home", None), env)
        home = explicit or user_dir("data")
        usual = (explicit or user_dir("config")) / "config.toml"
        named = given.pop("config", None) or env.get("TUTTI_CONFIG")
        mark = env.get(MOVED, "")
        if _MOVED.fullmatch(mark) is None:
            raise UsageFault(f'{MOVED} = "{mark}"', "it is set by tutti itself: unset it")
        moved, _, moved_run = mark.partition(" ")

        merged: dict[str, tuple[Any, str]] = {}
        if _is_file(usual):
            merged.update(_from_file(usual))
        if named:
            merged.update(_from_file(expanded(named)))
        merged.update(_from_environment(env))
        for key, value in given.items():
            name = SHORT_NAMES.get(key, key)
            if name not in KNOWN:
                raise unknown(key, [*KNOWN, *SHORT_NAMES])
            source = "--" + key.replace("_", "-")
            if "." in key:
                source = f"--set {key}"
            merged[name] = KNOWN[name].read(value), source

        tables: dict[str, dict[str, Any]] = {"": {}, **{section: {} for section in SECTIONS}}
        for name, (value, source) in merged.items():
            section, _, key = name.rpartition(".")
            tables[section][key] = KNOWN[name].check(value, source)
        _divide_disk(tables, {name: source for name, (_, source) in merged.items()})
        found = cls(
            home=home,
            node=NodeSettings(**tables[""]),
            sources={name: source for name, (_, source) in merged.items()},
            moved=moved,
            moved_run=moved_run,
            flags=dict(flags),
            **{section: kind(**tables[section]) for section, kind in SECTIONS.items()},
        )
        found.check_pauses()
        found.check_archive()
        return found

    def again(self) -> "NodeConfig":
        """The settings that a process of the same command line would have if it began now. Raises
        UsageFault as :meth:`load` and :meth:`check_places`."""
        found = NodeConfig.load(self.flags)
        found.check_places()
        return found

    def check_places(self) -> None:
        """Raises UsageFault for a file or a directory named by an option that does not exist."""
        for name in ("data", "tokenizer", "weights"):
            place = getattr(self.node, name)
            named = self.sources.get(name, "").startswith("--")
            if named and place and "://" not in place and not expanded(place).exists():
                raise UsageFault(f"{place} does not exist", f"check the path behind  --{name}")

    def check_archive(self) -> None:
        """Raises UsageFault for an archive of checkpoints that cannot be: no place, no interval, or
        no checkpoints that could be copied."""
        for place in (self.checkpoint.to, self.node.restore):
            if place:
                Address(place)
        if not self.checkpoint.to:
            return
        Every.parse(self.checkpoint.to_every)
        if not self.checkpoint.writes:
            raise UsageFault(
                "checkpoint.to copies the checkpoints of this disk, and none are written here",
                "leave checkpoint.within_s at its default",
            )

    def check_pauses(self) -> None:
        """Raises UsageFault for pauses by rules without checkpoints: the only holder of a stage
        would lose it."""
        rules = self.availability
        if (rules.idle_only or rules.hours or rules.max_load) and not self.checkpoint.writes:
            raise UsageFault(
                "a daemon that pauses by itself needs checkpoints, and none are written here",
                "leave checkpoint.every at its default, or pause by hand",
            )

    @property
    def stage(self) -> int | None:
        """The stage to host, asked for by the user or by the swarm since; None: choose one."""
        named = self.moved
        if named in ("", "-"):
            named = self.node.stage
        if named == "auto":
            return None
        return int(named)

    @property
    def open_to(self) -> str:
        """The stages it would host instead: "auto" any, "stage" block stages, "" none. Where the
        user named one, there are others only if the user says so as well."""
        named = self.node.stage != "auto"
        may_move = self.node.may_move and (not named or "may_move" in self.sources)
        if not may_move or self.node.role not in ("auto", "stage"):
            return ""
        if named:
            return "stage"
        return self.node.role

    @property
    def swarm(self) -> Path | None:
        if not self.node.swarm:
            return None
        return expanded(self.node.swarm)

    @property
    def admission(self) -> bytes:
        return bytes.fromhex(self.node.admission)

    def memory_limit(self, total: int) -> int:
        """Bytes this peer may use of a device that has ``total``."""
        text = self.node.memory.strip()
        if text.endswith("%"):
            return total * int(text[:-1]) // 100
        return min(total, size_of(text))

    @property
    def home_flag(self) -> str:
        """The flag that a command about this home needs: " --home DIR", "" for the default one."""
        if self.home == user_dir("data"):
            return ""
        return f" --home {shlex.quote(str(self.home))}"

    @property
    def identity_path(self) -> Path:
        return self.home / "identity.key"

    @property
    def events_path(self) -> Path:
        return self.home / "log" / "events.jsonl"

    @property
    def pause_path(self) -> Path:
        """Where the operator's pause is kept."""
        return self.home / "pause.json"

    @property
    def control_socket(self) -> Path:
        """Where the control service listens."""
        return control_socket(self.home)

    def prepare_control_socket(self) -> Path:
        """Create the socket's directory (0700, ours alone) and, when it is not home, a pointer file
        beside it for people."""
        path = self.control_socket
        with writing(path, _RIGHTS, Refused):
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            if path.parent != self.home:
                path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.parent != self.home:
            seen = path.parent.lstat()
            if (
                seen.st_uid != os.getuid()
                or seen.st_mode & 0o077
                or not path.parent.is_dir()
                or path.parent.is_symlink()
            ):
                raise Refused(
                    f"{path.parent} is not a private directory of yours",
                    "remove it, or choose a shorter --home",
                )
            with contextlib.suppress(OSError):  # the programs find the socket without it
                (self.home / "ctl.sock.path").write_bytes(os.fsencode(path) + b"\n")
        return path

    def swarm_dir(self, run_id: str) -> Path:
        return self.home / "swarms" / run_id[:12]

    def manifest_path(self, run_id: str) -> Path:
        return self.swarm_dir(run_id) / "swarm.toml"

    def checkpoint_dir(self, run_id: str) -> Path:
        return self.swarm_dir(run_id) / "ckpt"

    def incoming_dir(self, run_id: str, stage: int) -> Path:
        """Pieces of a stage's state that are still coming."""
        return self.swarm_dir(run_id) / "incoming" / f"stage-{stage}"

    def base_dir(self, run_id: str, stage: int) -> Path:
        """The fetched weights of a stage beside which adapters are trained."""
        return self.swarm_dir(run_id) / "base" / f"stage-{stage}"

    def restoring_dir(self, run_id: str, stage: int) -> Path:
        """Files of a checkpoint that is taken back from an archive; removed when that is done."""
        return self.swarm_dir(run_id) / "restoring" / f"stage-{stage}"

    def export_dir(self, run_id: str) -> Path:
        """Pieces of stages that an export has fetched and not finished with."""
        return self.swarm_dir(run_id) / "export"

    def tokenizer_path(self, run_id: str) -> Path:
        """The run's tokenizer.json, where an export has fetched it from another peer."""
        return self.swarm_dir(run_id) / "tokenizer.json"

    def file_path(self, run_id: str, name: str) -> Path:
        """A file that comes with the run's tokenizer or model, as the manifest lists it."""
        return self.swarm_dir(run_id) / "files" / name

    def keep_files(self, run_id: str, files: Mapping[str, bytes]) -> None:
        """Keep files by name. Raises Refused and OutOfResources."""
        for name, content in files.items():
            _keep(self.file_path(run_id, name), content)

    def keep_tokenizer(self, run_id: str, content: bytes) -> None:
        """Keep the run's tokenizer.json. Raises Refused and OutOfResources."""
        _keep(self.tokenizer_path(run_id), content)

    def remember(self, manifest: Manifest, invite: Invite | None = None) -> Path:
        """Keep a manifest (and the invite it came by) as the swarm a bare ``tutti start`` runs.
        Returns its file."""
        path = self.manifest_path(manifest.run_id)
        _keep(path, manifest.to_toml())
        if invite is not None:
            _keep(path.parent / "invite", f"{invite.encode()}\n".encode())
        _keep(self.home / "swarms" / "current", f"{manifest.run_id[:12]}\n".encode())
        return path

    def ports(self) -> tuple[int, int]:
        """The libp2p and the gRPC port that this home listened on last, so that invites outlive a
        restart; zeros for none."""
        try:
            p2p, grpc = map(int, _kept(self.home / "ports").split())
        except ValueError:
            return 0, 0
        port = KNOWN["transport.p2p_port"].rule
        if port.allows(p2p) and port.allows(grpc):
            return p2p, grpc
        return 0, 0

    def keep_ports(self, p2p: int, grpc: int) -> None:
        """Remember them; that they cannot be written costs a fresh invite after the next start and
        no more."""
        _note(self.home / "ports", f"{p2p} {grpc}\n")

    def acquaintances(self, run_id: str) -> tuple[str, ...]:
        """Multiaddrs of peers of a run that others could dial when this peer last saw them."""
        return within_limits(_kept(self.swarm_dir(run_id) / "peers").splitlines())

    def keep_acquaintances(self, run_id: str, addresses: Sequence[str]) -> None:
        """Remember them, so that a start finds the swarm when whoever made the invite is gone."""
        _note(self.swarm_dir(run_id) / "peers", "".join(f"{a}\n" for a in addresses))

    def names(self, run_id: str) -> dict[PeerId, str]:
        """Names that peers of a run have announced here."""
        try:
            kept = json.loads(_kept(self.swarm_dir(run_id) / "names.json"))
        except (ValueError, RecursionError):
            return {}
        if not isinstance(kept, dict):
            return {}
        return {PeerId(str(peer)): str(name) for peer, name in kept.items()}

    def keep_names(self, run_id: str, names: Mapping[PeerId, str]) -> None:
        """Keep the names that peers announce, so that a command without a daemon shows the same
        names."""
        _note(self.swarm_dir(run_id) / "names.json", json.dumps(names))

    def places(self, run_id: str) -> Places:
        """Where the files of a run are: as the user has set it here, else as the user set it at an
        earlier start of that run, if something is still there."""
        kept: dict[str, Any] = {}
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            kept = dict(json.loads(_kept(self.swarm_dir(run_id) / "places.json")))

        def found(name: str, here: str) -> str:
            if here:
                return os.path.abspath(os.path.expanduser(here))
            before = kept.get(name)
            with contextlib.suppress(ValueError):  # a zero byte
                if isinstance(before, str) and os.path.exists(before):
                    return before
            return ""

        hosts = kept.get("hosts")
        told = []
        if isinstance(hosts, list):
            told = [h for h in hosts if isinstance(h, str)]
        for_all_runs = [
            name
            for name in ("data", "tokenizer")
            if getattr(self.node, name) and not self.sources.get(name, "").startswith("--")
        ]
        return Places(
            found("data", self.node.data),
            found("tokenizer", self.node.tokenizer),
            found("weights", self.node.weights),
            self.node.data_hosts or tuple(told),
            tuple(n for n in for_all_runs if found(n, getattr(self.node, n)) != kept.get(n)),
        )

    def places_of(self, manifest: Manifest) -> Places:
        """As :meth:`places`, and whether the manifest is of this user: signed by the key of this
        home."""
        own = False
        with contextlib.suppress(LocalFault):  # no key here, or no signature, or another's
            manifest.verify(expected_owner=Identity.load(self.identity_path).peer_id)
            own = True
        return dataclasses.replace(self.places(manifest.run_id), own=own)

    def keep_places(self, run_id: str, places: Places) -> None:
        """Remember them, so that the next start of this run needs no flag."""
        of_all = dict.fromkeys(places.for_all_runs, "")
        said = dataclasses.replace(places, own=False, for_all_runs=(), **of_all)
        if said != NO_PLACES:
            _note(self.swarm_dir(run_id) / "places.json", json.dumps(dataclasses.asdict(said)))

    def keep_change(self, run_id: str, change: str) -> None:
        """Keep the owner's newest change to a run. Raises Refused and OutOfResources."""
        _keep(self.swarm_dir(run_id) / "change", change.encode())

    def change(self, run_id: str) -> str:
        """What was kept of a run, "" for nothing."""
        return _kept(self.swarm_dir(run_id) / "change")

    def keep_order(self, run_id: str, order: str) -> None:
        """Keep the owner's orders to a run that hold. Raises Refused and OutOfResources."""
        _keep(self.swarm_dir(run_id) / "order", order.encode())

    def order(self, run_id: str) -> str:
        """The orders that were kept of a run, "" for none."""
        return _kept(self.swarm_dir(run_id) / "order")

    def keep_cell(self, run_id: str, cell: str) -> None:
        """Keep which cell of a run this peer belongs to. Raises Refused and OutOfResources."""
        _keep(self.swarm_dir(run_id) / "cell", cell.encode())

    def change_cell(self, run_id: str, cell: str) -> None:
        """The next start is in that cell, and begins without parameters: the checkpoints here are
        of the cell that was left, and are set aside, where nothing reads them, in the place of
        those set aside before. Raises Refused and OutOfResources."""
        kept, aside = self.checkpoint_dir(run_id), self.swarm_dir(run_id) / "ckpt.left"
        with writing(aside, _RIGHTS, Refused):
            if kept.is_dir():
                if aside.is_dir():
                    shutil.rmtree(aside)
                os.replace(kept, aside)
        self.keep_cell(run_id, cell)

    def cell(self, run_id: str) -> str:
        """The cell kept for a run, "" if none was kept."""
        kept = _kept(self.swarm_dir(run_id) / "cell").strip()
        if not is_cell(kept):
            return ""
        return kept

    def keep_reference(self, run_id: str, loss: float) -> None:
        """Keep the loss that this peer saw first of a run, which later ones are shown beside; lost,
        the next one is the first."""
        _note(self.swarm_dir(run_id) / "reference", f"{loss!r}\n")

    def reference(self, run_id: str) -> float:
        """The loss that was kept, 0 if the file has no valid loss."""
        try:
            found = float(_kept(self.swarm_dir(run_id) / "reference"))
        except ValueError:
            return 0.0
        if 0 < found < 1e6:
            return found
        return 0.0

    def current(self) -> str:
        """The first 12 digits of the run used last; "" when there was none.

        Where "swarms/current" is lost or damaged it is the only run there is; raises UsageFault
        when there are several.
        """
        swarms = self.home / "swarms"
        name = _kept(swarms / "current").strip()
        if _RUN.fullmatch(name) and (swarms / name).is_dir():
            return name
        try:
            runs = sorted(p.name for p in swarms.iterdir() if _RUN.fullmatch(p.name) and p.is_dir())
        except OSError:
            return ""
        if len(runs) > 1:
            files = [shlex.quote(str(swarms / run / "swarm.toml")) for run in runs[:8]]
            named = "".join(f"\n  tutti start {file}" for file in files)
            raise UsageFault(
                f"{swarms / 'current'} is missing or damaged, and {len(runs)} runs are remembered "
                "here",
                f"name one:{named}",
            )
        if not runs:
            return ""
        return runs[0]

    def remembered(self, run_id: str = "") -> tuple[Manifest, Invite | None] | None:
        """The swarm used last (or the one named) with its invite, if it has one; None when there is
        no such swarm.

        Raises UsageFault when it is not known which was used last, Refused when its manifest or its
        invite is damaged.
        """
        name = run_id[:12] or self.current()
        path = self.manifest_path(name)
        if not name or not path.parent.is_dir():
            return None
        if not path.exists():
            raise Refused(f"{path} is missing", _MANIFEST_AGAIN)
        try:
            manifest = read_manifest(path)
        except TooNew as e:
            raise TooNew(f"{path}: {e.what}", e.next_step) from e
        except UsageFault as e:
            raise Refused(f"{path} is damaged: {e.what}; {e.next_step}", _MANIFEST_AGAIN) from e
        if manifest.run_id[:12] != name:
            raise Refused(
                f"{path} is damaged: it describes run {manifest.run_id[:12]}", _MANIFEST_AGAIN
            )
        return manifest, self.kept_invite(name)

    def kept_invite(self, run_id: str) -> Invite | None:
        """The invite that a run was joined by, None for none. Raises Refused for one that is
        damaged."""
        path = self.swarm_dir(run_id) / "invite"
        try:
            return Invite.decode(path.read_text(encoding="utf-8").strip())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, UsageFault) as e:
            why = e.strerror if isinstance(e, OSError) else e
            raise Refused(
                f"{path} is damaged: {why}", "join again with a fresh invite:  tutti join INVITE"
            ) from e


def settings_file(
    named: str | Path | None, home: str | None, environ: Mapping[str, str] | None = None
) -> Path:
    """The file of settings that belongs to the user of a home: the one named with --config or
    TUTTI_CONFIG, else config.toml. ``home``: as given with --home, None for the usual one. Raises
    UsageFault."""
    env = environ
    if env is None:
        env = os.environ
    chosen = named or env.get("TUTTI_CONFIG")
    if chosen:
        return expanded(chosen).absolute()
    return (home_named(home, env) or user_dir("config")) / "config.toml"


def config_toml(config: NodeConfig) -> str:
    """A config.toml with every setting and its meaning: those that a flag, the environment or a
    file has set with their values, the others behind a # with their defaults."""
    lines = [
        "# Settings of this peer: ~/.config/tutti/config.toml, or config.toml in the directory",
        "# that --home names. Those behind a # have their defaults. TUTTI_* in the environment",
        "# and flags come before this file.",
    ]
    section = ""
    for name, value, source, meaning in _settings(config):
        table, _, key = name.rpartition(".")
        if table != section:
            section = table
            lines += ["", f"[{table}]"]
        lines += ["", *toml_entry(key, value, meaning, behind=not source)]
    return "\n".join(lines) + "\n"


def config_document(config: NodeConfig) -> dict[str, dict[str, Any]]:
    """The same for machines: value, source ("" for built in) and meaning by the setting's name."""
    return {
        name: {"value": value, "source": source, "meaning": meaning}
        for name, value, source, meaning in _settings(config)
    }


def _settings(config: NodeConfig) -> Iterator[tuple[str, Any, str, str]]:
    """(name, value, source, meaning) of every setting."""
    for name, one in KNOWN.items():
        section, _, key = name.rpartition(".")
        value = getattr(getattr(config, section or "node"), key)
        yield name, value, config.sources.get(name, ""), one.text


def _kept(path: Path) -> str:
    """Content of a file, "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _keep(path: Path, content: bytes) -> None:
    """:func:`write_atomically`, unless that is there already: on a full disk a daemon starts again
    with the file that it has. Raises Refused and OutOfResources."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return
    with writing(path, _RIGHTS, Refused):
        write_atomically(path, content)


def _note(path: Path, text: str) -> None:
    """Keep what a peer can do without, if it can be written."""
    with contextlib.suppress(OSError):
        write_atomically(path, text.encode())


def _divide_disk(tables: dict[str, dict[str, Any]], sources: Mapping[str, str]) -> None:
    """Set the caps on streamed data and on checkpoints below the one on both. Raises UsageFault for
    caps that contradict each other or leave too little."""
    most = size_of(tables[""].get("max_disk", "0"))
    if not most:
        return
    where = f"max_disk = {tables['']['max_disk']}  ({sources['max_disk']})"
    data = min(tables[""].get("data_disk", NodeSettings.data_disk), most // 2)
    if "data_disk" in sources:
        data = tables[""]["data_disk"]
    if data < LEAST_DATA or data >= most:
        raise UsageFault(
            f"{where}: {data:,} bytes would be for streamed data, {most - data:,} for checkpoints",
            f"data needs {LEAST_DATA:,} at least, and checkpoints need room too: set max_disk to "
            f"{2 * LEAST_DATA:,} bytes or more, and data_disk below it",
        )
    kept = tables["checkpoint"].get("max_disk", 0)
    tables[""]["data_disk"] = data
    tables["checkpoint"]["max_disk"] = min(kept or most - data, most - data)


def size_of(text: str) -> int:
    """Bytes of "20GiB", "1.5 GB", "500", which its rule has let pass."""
    [(number, unit, binary)] = re.findall(r"([0-9.]+)\s*([KMGT]?)(i?)B?", text)
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit or " "))


def sizes_of(text: str) -> list[int]:
    """Bytes of each size in "8GB,8GB,24GB". Raises UsageFault for anything else; a number without a
    unit is refused, because nobody means bytes."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if re.fullmatch(_SIZE, word) is None or word[-1].isdigit():
            raise UsageFault(
                f"{word!r} is not the memory of a machine",
                "write sizes with commas between them, such as  8GB,8GB,24GB",
            )
    return [size_of(word) for word in words]


def write_atomically(
    path: Path, content: bytes, mode: int = 0o600, owner: tuple[int, int] | None = None
) -> None:
    """Whole or not at all: a temporary file beside ``path``, synced, renamed over it. Makes the
    directory where there is none, for this user alone. ``owner``: ids of a user and a group that
    the file is given to if this user may do so. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with held():
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as f:
                if owner is not None:
                    with contextlib.suppress(PermissionError):
                        os.fchown(handle, *owner)
                os.fchmod(handle, mode)
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


KNOWN = settings_of({"": NodeSettings, **SECTIONS})
"""Every setting of a peer by its dotted name."""
ENVIRONMENT: dict[str, str] = {
    **{"TUTTI_" + name.upper().replace(".", "_"): name for name in KNOWN},
    **{"TUTTI_" + short.upper(): name for short, name in SHORT_NAMES.items()},
}
"""Every variable that is read, beside TUTTI_HOME and TUTTI_CONFIG, and the setting it gives."""


def _from_environment(env: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Settings in ``TUTTI_*``. An empty value means "not given"; a name close to a known one is
    refused as a typing error."""
    found: dict[str, tuple[Any, str]] = {}
    reserved = ("TUTTI_HOME", "TUTTI_CONFIG", MOVED)
    for variable, text in sorted(env.items()):
        if not variable.startswith("TUTTI_") or variable in reserved:
            continue
        name = ENVIRONMENT.get(variable)
        if name is None:
            if difflib.get_close_matches(variable, [*ENVIRONMENT, *reserved], n=1, cutoff=0.85):
                raise unknown(variable, [*ENVIRONMENT, *reserved], "environment")
            continue
        if text.strip():
            found[name] = (KNOWN[name].read(text), variable)
    return found


def _is_file(path: Path) -> bool:
    """Return True if there is a settings file. Raises UsageFault where nobody may look for it."""
    try:
        return path.is_file()
    except PermissionError as e:
        raise UsageFault(
            f"{path.parent} is closed to this user", "name a directory of yours with  --home DIR"
        ) from e


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageFault(
            f"cannot read {path}: {e.strerror}", "name an existing file with --config"
        ) from e
    except (ValueError, RecursionError) as e:
        raise UsageFault(f"{path} is not TOML: {e}", f"write it as in\n{EXAMPLE}") from e
    found: dict[str, tuple[Any, str]] = {}
    for key, value in table.items():
        entries = {key: value}
        if key in SECTIONS and isinstance(value, dict):
            entries = {f"{key}.{k}": v for k, v in value.items()}
        for name, entry in entries.items():
            if name not in KNOWN:
                raise unknown(name, [*KNOWN, *SECTIONS], str(path))
            found[name] = (entry, str(path))
    return found
