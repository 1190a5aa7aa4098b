"""``tutti service``: the unit as systemd reads it, its life through systemctl, and machines without
systemd."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.app.launch import PATIENCE_S
from node.app.owner import service, systemd
from node.app.owner.service import Wanted, unit_name, unit_of
from node.config import NodeConfig
from node.core.errors import ExitCode, UsageFault
from tests.cli.conftest import refused

INVITE = "tutti2" + "a" * 60
ANALYZE = shutil.which("systemd-analyze")
SYSTEMCTL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *--property=Version*) echo "{version}" ;;
  *--property=*) cat {state} ;;
esac
exit {code}
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a user's systemd whose answers are canned. ``calls()`` are the lines that
    systemctl was called with, ``says(...)`` changes its answers."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "calls"
    state = tmp_path / "state"
    state.write_text("LoadState=loaded\nActiveState=inactive\n")
    log.touch()

    class Machine:
        units = tmp_path / "config" / "systemd" / "user"

        def says(self, *, code=0, version="255.4", confines=True, **properties):
            text = SYSTEMCTL.format(log=log, version=version, state=state, code=code)
            (folder / "systemctl").write_text(text)
            (folder / "systemd-run").write_text(f"#!/bin/sh\nexit {0 if confines else 217}\n")
            for tool in ("systemctl", "systemd-run"):
                (folder / tool).chmod(0o755)
            if properties:
                state.write_text("".join(f"{k}={v}\n" for k, v in properties.items()))

        def calls(self):
            return [line.removeprefix("--user ") for line in log.read_text().splitlines()]

    made = Machine()
    made.says()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(systemd, "_RUNNING", tmp_path)
    monkeypatch.setattr(systemd, "_LINGER", tmp_path / "linger")
    return made


def option(text: str, name: str) -> list[str]:
    """Values of an option of a unit."""
    return re.findall(rf"(?m)^{name}=(.*)$", text)


def started_by(text: str) -> list[str]:
    """Words of the command of a unit, as systemd hands them over."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"', option(text, "ExecStart")[0])
    plain = [re.sub(r"\\(.)", r"\1", word) for word in words]
    return [word.replace("%%", "%").replace("$$", "$") for word in plain]


def test_a_unit_starts_what_start_would_have_started(tutti, home, ours, tmp_path, machine):
    (tmp_path / "my text.txt").write_text("text")
    shown = tutti(
        *("service", "install", "--print", "--threads", "2", "--max-up", "20Mbit"),
        *("--data", "my text.txt", "--name", "anna 4090", "--set", "limits.in_flight=3"),
    ).good()
    words = started_by(shown)
    assert words[0] == sys.executable
    assert words[1].endswith("tutti.py")
    assert words[2:5] == ["--home", str(home), "start"]
    given = dict(w.split("=", 1) for w in words[5:] if w != "--set")
    assert given == {
        "name": "anna 4090",
        "threads": "2",
        "data": str(tmp_path / "my text.txt"),  # the shell's directory is not the service's
        "transport.max_up": "2500000.0",
        "limits.in_flight": "3",
    }
    again = NodeConfig.load({"home": home, **given}, {})
    assert (again.node.threads, again.transport.max_up) == (2, 2.5e6)
    assert not machine.calls()


def test_a_unit_keeps_the_settings_of_the_shell_and_names_the_file(
    tutti, home, machine, monkeypatch
):
    monkeypatch.setenv("TUTTI_THREADS", "3")
    monkeypatch.setenv("TUTTI_NAME", "")
    (home.parent / "mine.toml").write_text("nice = 4\n")
    shown = tutti("service", "install", "--print", "--config", "mine.toml").good()
    words = started_by(shown)
    assert "threads=3" in words
    assert not [w for w in words if w.startswith(("nice", "name"))]  # the file says the first
    assert words[words.index("--config") + 1] == str(home.parent / "mine.toml")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((INVITE,), "tutti join INVITE --no-start"),
        (("--join", INVITE), "others can read"),
        (("--set", "admission=aabb"), "others can read"),
        (("nowhere.toml",), "there is no nowhere.toml"),
        (("--background",), "--background"),
        (("--thraeds", "3"), "--thraeds"),
        (("--threads", "many"), "many"),
        (("--memory-max", "many"), "memory"),
        (("--memory", "8GiB", "--memory-max", "8GiB"), "leaves nothing"),
        (("--name", "an\nna"), "name"),
        (("--data", "a\nb"), "character"),
        (("--set", "checkpoint.to=s3://key:pw@bucket/run"), "no password"),
        (("--from", "https://host/run?token=x"), "no password"),
    ],
)
def test_what_no_unit_may_hold_is_refused(tutti, machine, words, says):
    refused(tutti("service", "install", *words), 2, says)
    assert not machine.units.exists()


def text_of(ours: NodeConfig, version: int = 255, **wanted) -> str:
    return unit_of(ours, Wanted(home=str(ours.home), **wanted), version, {}).text()


def test_the_home_alone_can_be_written(ours, machine, tmp_path, monkeypatch):
    monkeypatch.setattr(systemd, "_in_tmp", lambda path: False)
    ours.home.mkdir()
    (ours.home / "config.toml").write_text(
        f'record = "{tmp_path}/recordings/m.rec"\ntensorboard = "{tmp_path}/curves"\n'
    )
    ours = NodeConfig.load({"home": ours.home}, {})
    text = text_of(ours, writable=(str(tmp_path / "models"),))
    for line in ("ProtectSystem=strict", "PrivateTmp=yes", "NoNewPrivileges=yes", "UMask=0077"):
        assert line in text.splitlines()
    writable = option(text, "ReadWritePaths")
    assert writable[0] == f'"{ours.home}"'
    assert {
        f'"-{tmp_path / name}"' for name in ("models", "recordings", "curves", "cache/tutti")
    } == set(writable[1:])
    assert option(text, "RestrictAddressFamilies") == ["AF_UNIX AF_INET AF_INET6 AF_NETLINK"]
    assert option(text, "SystemCallFilter") == ["@system-service"]
    bare = text_of(ours, confined=False)
    assert "ProtectSystem" not in bare
    assert "ReadWritePaths" not in bare
    assert "NoNewPrivileges=yes" in bare


def test_a_home_in_tmp_is_seen_through_a_private_tmp(machine, monkeypatch):
    ours = NodeConfig.load({"home": "/tmp/tutti-of-a-test"}, {})
    text = text_of(ours)
    assert option(text, "BindPaths")[0] == '"/tmp/tutti-of-a-test"'
    assert '"/tmp/tutti-of-a-test"' not in option(text, "ReadWritePaths")


def test_a_home_in_tmp_with_a_colon_is_refused(machine):
    with pytest.raises(UsageFault, match="colon"):
        text_of(NodeConfig.load({"home": "/tmp/tutti:of-a-test"}, {}))


def test_a_service_comes_back_later_and_later_unless_a_person_must_act(ours, machine):
    text = text_of(ours)
    assert option(text, "Restart") == ["on-failure"]
    assert option(text, "RestartPreventExitStatus") == ["2 5 6"]
    assert option(text, "SuccessExitStatus") == [str(int(ExitCode.INTERRUPTED))]
    assert option(text, "StartLimitIntervalSec") == ["0"]
    assert option(text, "RestartSteps")
    old = text_of(ours, version=252)
    assert not option(old, "RestartSteps")
    assert option(old, "RestartSec") == ["30"]


def test_a_service_has_the_time_to_end_that_a_daemon_may_take(ours, machine):
    from node.app.peer import KEEP_S

    [seconds] = option(text_of(ours), "TimeoutStopSec")
    assert float(seconds) >= KEEP_S + PATIENCE_S  # its own checkpoint, then its children's
    assert option(text_of(ours), "KillMode") == ["mixed"]


@pytest.mark.parametrize(("asked", "line"), [("16GiB", "17179869184"), ("80%", "80%"), ("", None)])
def test_the_memory_is_capped_if_the_user_says_so(ours, machine, asked, line):
    assert option(text_of(ours, memory_max=asked), "MemoryMax") == ([line] if line else [])


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="tutti-") as folder:
        yield Path(folder)


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("version", [252, 255])
def test_systemd_reads_the_unit(tmp_path, machine, version, short_folder):
    """Also with a home and data whose names have all that systemd gives a meaning to."""
    home = short_folder / 'ho me %h $HOME "q" \\n é'
    home.mkdir()
    (home / "da ta").touch()
    flags = {"home": home, "data": str(home / "da ta"), "name": "anna"}
    ours = NodeConfig.load(flags, {})
    text = text_of(ours, version, memory_max="80%", writable=(str(home / "out"),))
    assert str(home) in started_by(text)
    [command] = option(text, "ExecStart")
    assert "ho me %%h $$HOME" in command  # doubled, they mean themselves
    assert "ho me %%h $HOME" in option(text, "WorkingDirectory")[0]  # has no variables
    file = tmp_path / "tutti-test.service"
    file.write_text(text)
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [ANALYZE, "--user", "verify", str(file)], capture_output=True, text=True, timeout=60
    )
    unknown_here = ("RestartSteps", "RestartMaxDelaySec")
    said = [s for s in done.stderr.splitlines() if s and not any(u in s for u in unknown_here)]
    assert (done.returncode, said) == (0, [])


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here")
def test_systemd_finds_the_unit_less_exposed_than_an_open_one(tmp_path, ours, machine):
    def exposure(**wanted):
        file = tmp_path / "tutti-test.service"
        file.write_text(text_of(ours, **wanted))
        command = [ANALYZE, "security", "--offline=true", "--no-pager", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return float(re.findall(r"Overall exposure level .*: ([0-9.]+)", done.stdout)[0])

    assert exposure() <= 3.0 < exposure(confined=False)


def test_a_service_is_installed_seen_and_removed(tutti, home, ours, machine):
    shown = tutti("service", "install", "--now", "--threads", "1").good()
    name = unit_name(ours)
    file = machine.units / name
    assert "threads=1" in file.read_text()
    assert (file.stat().st_mode & 0o777) == 0o600
    for word in (str(file), f"started  {name}", "loginctl enable-linger", "--writable"):
        assert word in shown
    assert [c for c in machine.calls() if not c.startswith("show")] == [
        "daemon-reload",
        f"enable {name}",
        f"restart {name}",
    ]
    machine.says(
        LoadState="loaded",
        ActiveState="active",
        UnitFileState="enabled",
        MainPID=77,
        NRestarts=2,
        ExecMainStatus=0,
    )
    seen = tutti("service", "status")
    assert "active, pid 77" in seen.good()
    assert "restarts 2" in seen.stdout
    document = json.loads(tutti("service", "status", "--json").good())
    assert (document["pid"], document["enabled"], document["lingers"]) == (77, True, False)
    assert str(home) in tutti("service", "uninstall").good()
    assert not file.exists()
    assert machine.calls()[-2:] == [f"disable --now {name}", "daemon-reload"]
    refused(tutti("service", "uninstall"), 2, f"tutti --home {home} service install")


def test_a_service_that_is_down_says_how_to_start_it_and_why_it_ended(tutti, ours, machine):
    assert "not installed" in tutti("service", "status").stdout
    tutti("service", "install").good()
    machine.says(LoadState="loaded", ActiveState="failed", Result="exit-code", ExecMainStatus=5)
    shown = tutti("service", "status")
    assert shown.returncode == ExitCode.NOT_RUNNING
    for word in (
        "exit code 5",
        "journalctl --user -u",
        f"systemctl --user start {unit_name(ours)}",
    ):
        assert word in shown.stdout


def test_each_home_has_a_service_of_its_own(home, machine):
    first = NodeConfig.load({"home": home}, {})
    second = NodeConfig.load({"home": home / "other"}, {})
    usual = NodeConfig.load({}, {})
    names = {unit_name(one) for one in (first, second, usual)}
    assert len(names) == 3
    assert "tutti.service" in names


def test_nothing_is_written_where_services_cannot_be_confined(tutti, machine):
    machine.says(confines=False)
    refused(tutti("service", "install"), ExitCode.SERVICE_UNFIT, "--no-sandbox", "code 217")
    assert not machine.units.exists()
    tutti("service", "install", "--no-sandbox").good()


def test_what_systemctl_refuses_is_shown(tutti, machine):
    machine.says(code=1)
    refused(tutti("service", "install"), ExitCode.SERVICE_UNFIT, "does not answer")


@pytest.mark.usefixtures("daemon")
def test_a_service_is_not_started_beside_a_daemon(tutti, machine):
    refused(tutti("service", "install", "--now"), 5, "tutti stop")
    assert not machine.units.exists()
    tutti("service", "install").good()  # for the next boot


def test_restart_leaves_a_service_to_systemd(tutti, daemon, ours, machine):
    tutti("service", "install").good()
    machine.says(LoadState="loaded", MainPID=os.getpid())
    tutti("restart").good()
    assert machine.calls()[-1] == f"restart {unit_name(ours)}"
    assert not daemon.stopped.is_set()


@pytest.mark.parametrize("verb", ["restart", "uninstall", "install"])
def test_a_service_gets_the_time_to_end_that_its_unit_allows(
    tutti, daemon, machine, monkeypatch, verb
):
    """It writes a checkpoint; systemctl returns when it has ended."""
    tutti("service", "install").good()
    machine.says(LoadState="loaded", ActiveState="active", MainPID=os.getpid())
    waits = {}
    run = subprocess.run

    def recorded(command, **how):
        waits[command[2]] = how["timeout"]
        return run(command, **how)

    monkeypatch.setattr(systemd.subprocess, "run", recorded)
    words = {"restart": ("restart",), "install": ("service", "install", "--now")}
    shown = tutti(*words.get(verb, ("service", verb)))
    assert shown.returncode == 0, shown.stderr
    assert waits["disable" if verb == "uninstall" else "restart"] > service.STOP_S
    assert waits["show"] == systemd.CALL_S
    assert f"up to {service.STOP_S:.0f} s" in shown.stderr


@pytest.mark.parametrize(
    ("kernel", "running", "environment", "says"),
    [
        ("Linux version 6", False, {}, "does not run this machine"),
        ("Linux 5.15 microsoft-standard-WSL2", False, {}, "systemd=true"),
        ("Linux version 6", True, {"XDG_RUNTIME_DIR": None}, "XDG_RUNTIME_DIR"),
        ("Linux version 6", True, {}, "not installed"),
    ],
)
def test_a_machine_without_user_services_is_told_why(
    tutti, tmp_path, machine, monkeypatch, kernel, running, environment, says
):
    (tmp_path / "version").write_text(kernel)
    monkeypatch.setattr(systemd, "_KERNEL", tmp_path / "version")
    monkeypatch.setattr(systemd, "_RUNNING", tmp_path if running else tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for name in environment:
        monkeypatch.delenv(name)
    for verb in ("install", "uninstall", "status"):
        refused(tutti("service", verb), ExitCode.SERVICE_UNFIT, says)
    assert not machine.units.exists()


def test_a_home_whose_socket_is_in_tmp_is_refused(machine, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    ours = NodeConfig.load({"home": tmp_path / ("long" * 30)}, {})
    with pytest.raises(UsageFault, match="no command would find the socket"):
        text_of(ours)


# ------------------------------------------------------------ doctor


def checked(tutti) -> dict:
    document = json.loads(tutti("doctor", "service", "--json").good())
    [one] = document["checks"]
    return one


def test_doctor_looks_at_the_service(tutti, ours, machine, tmp_path):
    assert "none is installed" in checked(tutti)["cause"]
    tutti("service", "install").good()
    machine.says(LoadState="loaded", ActiveState="active", UnitFileState="enabled")
    out = checked(tutti)
    assert out["fix"].startswith("loginctl enable-linger")
    assert (out["ok"], out["code"]) == (True, ExitCode.SERVICE_UNFIT)  # a warning
    (tmp_path / "linger").mkdir()
    (tmp_path / "linger" / service._user()).touch()
    assert "starts at boot" in checked(tutti)["cause"]
    machine.says(LoadState="loaded", ActiveState="active", UnitFileState="disabled")
    assert checked(tutti)["fix"].startswith("systemctl --user enable")
    file = machine.units / unit_name(ours)
    file.write_text(file.read_text().replace(sys.executable, "/nowhere/python"))
    assert "/nowhere/python, which is gone" in checked(tutti)["cause"]


def test_doctor_tells_wsl_what_is_missing(tutti, machine, tmp_path, monkeypatch):
    (tmp_path / "version").write_text("Linux 5.15 Microsoft")
    monkeypatch.setattr(systemd, "_KERNEL", tmp_path / "version")
    monkeypatch.setattr(systemd, "_RUNNING", tmp_path / "none")
    machine.says(code=1)
    out = checked(tutti)
    assert "systemd=true" in out["fix"]
    assert "wsl --shutdown" in out["fix"]
    (tmp_path / "version").write_text("Linux version 6")
    assert "no systemd here" in checked(tutti)["cause"]


def test_doctor_offline_asks_nobody(tutti, network):
    asked = network()
    document = json.loads(tutti("doctor", "--offline", "--json").stdout)
    names = {one["check"] for one in document["checks"]}
    assert names == {"versions", "device", "disk", "data", "service"}
    assert not asked
    refused(tutti("doctor", "net", "--offline"), 2, "net asks other peers")


def test_the_unit_is_a_file_of_this_user(machine, tmp_path):
    assert systemd.unit_path("x.service") == Path(tmp_path / "config/systemd/user/x.service")
