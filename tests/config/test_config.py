import os
import re
import stat
from pathlib import Path

import pytest

from node.config import NodeConfig
from node.core.errors import Refused, UsageFault
from node.core.home import MAX_SOCKET_PATH, user_dir
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest


def test_flags_override_environment_files_and_defaults(tmp_path):
    (tmp_path / "config.toml").write_text(
        "threads = 1\nrole = 'ends'\n[limits]\nin_flight = 2\n[transport]\np2p_port = 1\n"
    )
    named = tmp_path / "named.toml"
    named.write_text("threads = 2\nrole = 'stage'\n[transport]\np2p_port = 2\n")
    env = {
        "TUTTI_HOME": str(tmp_path),
        "TUTTI_ROLE": "rendezvous",
        "TUTTI_P2P_PORT": "3",
        "HOME": "/nowhere",
    }
    config = NodeConfig.load({"config": named, "p2p_port": 4, "grpc_port": None}, env)
    assert (config.home, config.limits.in_flight) == (tmp_path, 2)
    assert (config.node.threads, config.node.role) == (2, "rendezvous")
    assert (config.transport.p2p_port, config.transport.grpc_port) == (4, 0)
    assert config.sources["role"] == "TUTTI_ROLE"
    assert config.sources["transport.p2p_port"] == "--p2p-port"


def test_every_variable_of_a_container_is_read(tmp_path):
    env = {
        "TUTTI_HOME": str(tmp_path),
        "TUTTI_STAGE": "2",
        "TUTTI_SWARM": "/etc/swarm.toml",
        "TUTTI_LISTEN": "0.0.0.0",
        "TUTTI_JOIN": "tutti2abc, /dns4/b/tcp/1/p2p/X",
        "TUTTI_GRPC_PORT": "7",
        "TUTTI_NAME": "n",
        "TUTTI_ANNOUNCE": "a:1 b:2",
        "TUTTI_FORCE_TUNNEL": "yes",
        "TUTTI_DIRECTORY_TTL_S": "20",
        "TUTTI_METRICS_PORT": "-1",
        "TUTTI_DEVICE": "",
    }
    config = NodeConfig.load({}, env)
    assert (config.stage, str(config.swarm), config.directory.ttl_s) == (2, "/etc/swarm.toml", 20.0)
    assert config.node.join == ("tutti2abc", "/dns4/b/tcp/1/p2p/X")
    assert (config.node.metrics_port, config.node.device) == (-1, "auto")  # empty means not given
    assert (config.transport.host, config.transport.announce) == ("0.0.0.0", ("a:1", "b:2"))
    assert config.transport.force_tunnel is True


@pytest.mark.parametrize(
    ("flags", "env", "says", "where", "helps"),
    [
        ({}, {"TUTTI_P2P_PORT": "many"}, 'transport.p2p_port = "many"', "TUTTI_P2P_PORT", ""),
        ({}, {"TUTTI_P2P_PORT": "70000"}, "transport.p2p_port = 70000", "TUTTI_P2P_PORT", ""),
        ({}, {"TUTTI_FORCE_TUNNEL": "perhaps"}, "transport.force_tunnel", "TUTTI_FORCE_TUNNEL", ""),
        ({"role": "boss"}, {}, 'role = "boss"', "--role", ""),
        ({"stage": "0"}, {}, 'stage = "0"', "--stage", "block stage"),
        ({"stage": "-1"}, {}, 'stage = "-1"', "--stage", "block stage"),
        ({"stage": "first"}, {}, 'stage = "first"', "--stage", "block stage"),
        ({"memory": "lots"}, {}, 'memory = "lots"', "--memory", ""),
        ({"memory": "0.5kB"}, {}, 'memory = "0.5kB"', "--memory", ""),
        ({"reserve": "10%"}, {}, 'reserve = "10%"', "--reserve", ""),
        ({"home": "~nobody.here/x"}, {}, "~nobody.here/x: there is no such user", "", "path"),
        ({"config": "~nobody.here/x"}, {}, "~nobody.here/x: there is no such user", "", "path"),
        ({"limits.in_fligt": "3"}, {}, "limits.in_fligt is not a setting", "", ""),
        ({}, {"TUTTI_P2P_PORTS": "1"}, "TUTTI_P2P_PORTS is not a setting", "environment", ""),
    ],
)
def test_a_bad_setting_is_named_with_its_origin(tmp_path, flags, env, says, where, helps):
    with pytest.raises(UsageFault) as fault:
        NodeConfig.load({"home": tmp_path, **flags}, env)
    assert fault.value.what.startswith(says)
    assert where in fault.value.what
    assert fault.value.next_step
    assert helps in fault.value.next_step


def test_the_owners_newest_change_to_a_run_is_kept(tmp_path):
    config = NodeConfig.load({"home": tmp_path}, {})
    assert config.change("ab" * 32) == ""
    config.keep_change("ab" * 32, "signature\nbody")
    assert config.change("ab" * 32) == "signature\nbody"
    assert config.change("cd" * 32) == ""
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot write"):
        NodeConfig.load({"home": tmp_path / "file"}, {}).keep_change("ab" * 32, "x")


def test_a_bad_file_names_itself(tmp_path):
    (tmp_path / "config.toml").write_text("[transport]\nport = 1\n")
    with pytest.raises(UsageFault, match="transport.port is not a setting") as fault:
        NodeConfig.load({"home": tmp_path}, {})
    assert "p2p_port" in fault.value.next_step
    with pytest.raises(UsageFault, match="cannot read"):
        NodeConfig.load({"home": tmp_path / "other", "config": tmp_path / "none.toml"}, {})


@pytest.mark.parametrize(
    ("text", "bytes_"), [("80%", 800), ("500B", 500), ("1KiB", 1000), ("100", 100), ("100%", 1000)]
)
def test_memory_is_a_share_or_a_size_within_what_exists(tmp_path, text, bytes_):
    assert NodeConfig.load({"home": tmp_path, "memory": text}, {}).memory_limit(1000) == bytes_


def test_a_long_home_gets_a_short_private_socket_and_a_pointer(tmp_path, monkeypatch):
    short = tmp_path / "run"
    short.mkdir()
    monkeypatch.setattr("node.core.home._runtime_dir", lambda: str(short))
    home = tmp_path / ("deep" * 40)
    config = NodeConfig.load({"home": home}, {})
    path = config.prepare_control_socket()
    assert path == config.control_socket
    assert len(os.fsencode(path)) <= MAX_SOCKET_PATH + len(str(short))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (home / "ctl.sock.path").read_text().strip() == str(path)
    assert NodeConfig.load({"home": tmp_path / ("deeq" * 40)}, {}).control_socket != path
    path.parent.chmod(0o755)
    with pytest.raises(Refused, match="private directory"):
        config.prepare_control_socket()


def test_the_swarm_used_last_is_remembered_with_its_invite(tmp_path):
    config = NodeConfig.load({"home": tmp_path}, {})
    assert config.remembered() is None
    one, two = (
        Manifest.parse(Manifest.default_demo().sign(Identity.ephemeral())) for _ in range(2)
    )
    invite = Invite(one.run_id, one.swarm.owner, (f"/ip4/127.0.0.1/tcp/1/p2p/{one.swarm.owner}",))
    config.remember(one, invite)
    assert config.remembered() == (one, invite)
    config.remember(two)
    assert config.remembered() == (two, None)
    assert config.remembered(one.run_id) == (one, invite)
    config.remember(one)  # started again by file: the invite is kept
    assert config.remembered() == (one, invite)
    assert not [p for p in tmp_path.rglob(".*") if p.is_file()]  # no temporary file left


@pytest.mark.parametrize(
    ("text", "bytes_a_second"),
    [
        ("20Mbit", 2.5e6),
        ("20Mbit/s", 2.5e6),
        ("20Mbps", 2.5e6),
        ("20 Mbits", 2.5e6),
        ("2.5MB", 2.5e6),
        ("2.5MB/s", 2.5e6),
        ("20M", 20e6),
        ("500k", 500e3),
        ("500K", 500e3),
        ("1GiB", 2**30),
        ("64KiB/s", 65536),
        ("250000", 250e3),
        ("0", 0),
        ("0Mbit", 0),
    ],
)
def test_a_cap_is_understood_as_people_write_rates(tmp_path, text, bytes_a_second):
    for flags, env in (
        ({"max_up": text}, {}),
        ({}, {"TUTTI_MAX_UP": text}),
        ({"transport.max_up": text}, {}),
    ):
        config = NodeConfig.load(flags, {"TUTTI_HOME": str(tmp_path), **env})
        assert config.transport.max_up == bytes_a_second
    assert config.transport.max_down == 0


def test_a_file_gives_caps_as_numbers_or_as_text(tmp_path):
    (tmp_path / "config.toml").write_text(
        '[transport]\nmax_up = 250000\nmax_down = "8Mbit"\n'
        '[checkpoint]\nmax_up = "1MB"\n[reach]\nrelay_rate = "0"\n'
    )
    config = NodeConfig.load({}, {"TUTTI_HOME": str(tmp_path)})
    assert (config.transport.max_up, config.transport.max_down) == (250e3, 1e6)
    assert (config.checkpoint.max_up, config.reach.relay_rate) == (1e6, 0)


@pytest.mark.parametrize(
    "text", ["20Mb", "fast", "-1", "20 Mbit per second", "1TB", "i", "2iB", "20Mbps/s", "nan", "20"]
)
def test_an_invalid_or_too_small_cap_is_refused_with_examples(tmp_path, text):
    with pytest.raises(UsageFault, match="transport.max_up") as fault:
        NodeConfig.load({"max_up": text}, {"TUTTI_HOME": str(tmp_path)})
    assert ("20Mbit" in str(fault.value.next_step)) or (
        "too little to take part" in fault.value.next_step
    )


@pytest.mark.parametrize("kind", ["data", "config", "cache"])
@pytest.mark.parametrize("base", ["", "/somewhere/else"])
def test_without_a_home_files_are_in_the_platform_directories(monkeypatch, kind, base):
    platformdirs = pytest.importorskip("platformdirs").PlatformDirs("tutti", appauthor=False)
    variable = f"XDG_{kind.upper()}_HOME"
    monkeypatch.setenv(variable, base)
    assert user_dir(kind) == getattr(platformdirs, f"user_{kind}_path")
    monkeypatch.delenv(variable)
    assert user_dir(kind) == getattr(platformdirs, f"user_{kind}_path")


def test_a_home_that_is_closed_to_this_user_is_named(tmp_path, monkeypatch):
    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", closed)
    with pytest.raises(UsageFault, match=f"{re.escape(str(tmp_path))} is closed to this user"):
        NodeConfig.load({"home": tmp_path}, {})
