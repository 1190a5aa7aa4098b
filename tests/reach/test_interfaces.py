"""Kinds of interfaces by made-up directories of Linux, and the order of addresses."""

import errno
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from node.reach import interfaces, nearby
from node.reach.interfaces import (
    InterfaceKind,
    kind_of,
    own_addresses,
    without_bridges,
    without_own_bridges,
)
from node.transport.addresses import grpc_target, host_of, host_of_target

HARDWARE, OTHER, TUNNEL, BRIDGE = InterfaceKind

NETWORKS: dict[str, tuple[Iterable[str], str]] = {
    # name: (entries of its directory, text of uevent)
    "enp3s0": (["device/"], ""),
    "wlan0": (["device/"], "DEVTYPE=wlan"),
    "wwan0": (["device/", "type=65534"], "DEVTYPE=wwan"),
    "bond0": (["lower_enp3s0"], "DEVTYPE=bond"),
    "bond0.7": (["lower_bond0"], "DEVTYPE=vlan"),
    "br-lan": (["bridge/", "lower_bond0.7", "lower_veth1"], "DEVTYPE=bridge"),
    "veth1": ([], ""),
    "eth0": ([], ""),
    "docker0": (["bridge/", "lower_veth1"], "DEVTYPE=bridge"),
    "mynet": (["bridge/"], "DEVTYPE=bridge"),
    "office": (["type=65534"], "DEVTYPE=wireguard"),
    "home": (["tun_flags", "type=65534"], ""),
    "ztabc": (["tun_flags", "type=1"], ""),
    "overlay": (["lower_enp3s0"], "DEVTYPE=vxlan"),
    "he-ipv6": (["type=776"], ""),
    "loop": (["lower_loop"], ""),
}
KINDS = {
    HARDWARE: ("enp3s0", "wlan0", "wwan0", "bond0", "bond0.7", "br-lan"),
    OTHER: ("eth0", "loop"),
    TUNNEL: ("office", "home", "ztabc", "overlay", "he-ipv6"),
    BRIDGE: ("veth1", "docker0", "mynet"),
}


@pytest.fixture
def networks(tmp_path: Path) -> Path:
    for name, (entries, uevent) in NETWORKS.items():
        here = tmp_path / name
        here.mkdir()
        (here / "uevent").write_text(f"INTERFACE={name}\n{uevent}\n")
        for entry in entries:
            file, _, text = entry.partition("=")
            if file.endswith("/"):
                (here / file).mkdir()
            else:
                (here / file).write_text(text + "\n")
    return tmp_path


def test_the_kind_is_what_linux_says(networks: Path) -> None:
    found = {name: kind_of(name, networks) for name in NETWORKS}
    assert found == {name: kind for kind, names in KINDS.items() for name in names}


@pytest.mark.parametrize(
    ("name", "kind"), [("en0", HARDWARE), ("utun3", TUNNEL), ("bridge100", BRIDGE)]
)
def test_elsewhere_names_tell_the_kind(tmp_path: Path, name: str, kind: InterfaceKind) -> None:
    assert kind_of(name, tmp_path) is kind


@pytest.fixture(autouse=True)
def first_look(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test takes the interfaces that an earlier one has made up, or a second look."""
    interfaces._looked.cache_clear()
    monkeypatch.setattr(interfaces, "_newest_look", [({}, frozenset())])
    monkeypatch.setattr(interfaces, "time", SimpleNamespace(monotonic=lambda: 7.0))
    yield
    interfaces._looked.cache_clear()


@pytest.fixture
def nine_bridges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    bridges = [f"172.{n}.0.1" for n in range(17, 26)]
    here = [(f"br-{a}", a) for a in bridges]
    here += [("lan", "192.168.7.2"), ("lan", "fd00::2"), ("tun0", "100.64.0.9"), ("lo", "::1")]
    there = [(name, address, name != "br-172.25.0.1") for name, address in here]
    monkeypatch.setattr(interfaces, "every_address", lambda: there)
    kinds = {"lan": HARDWARE, "lo": HARDWARE, "tun0": TUNNEL}
    monkeypatch.setattr(interfaces, "kind_of", lambda name: kinds.get(name, BRIDGE))
    return bridges


def test_what_others_are_given_has_no_address_of_a_bridge(nine_bridges: list[str]) -> None:
    own = own_addresses()
    assert without_bridges(own, str) == ["192.168.7.2", "fd00::2", "100.64.0.9"]
    assert without_bridges(nine_bridges, str) == nine_bridges, "where there are no others"


def test_addresses_of_bridges_and_tunnels_come_last(nine_bridges: list[str]) -> None:
    assert own_addresses() == ("192.168.7.2", "fd00::2", "100.64.0.9", *nine_bridges[:-1])
    assert interfaces.address_kinds()[nine_bridges[-1]] is BRIDGE, "it does not run"


def test_interfaces_that_have_link_local_addresses_alone_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host of containers has hundreds of them."""
    here = [(f"veth{n}", f"fe80::{n:x}", True) for n in range(1, 200)]
    here.append(("lan", "192.168.7.2", True))
    looked: list[str] = []
    monkeypatch.setattr(interfaces, "every_address", lambda: here)
    monkeypatch.setattr(interfaces, "kind_of", lambda name: looked.append(name) or HARDWARE)
    assert own_addresses() == ("192.168.7.2",)
    assert looked == ["lan"]


def test_one_look_at_the_interfaces_serves_for_a_while(
    monkeypatch: pytest.MonkeyPatch, nine_bridges: list[str]
) -> None:
    """Every dial and every list of addresses asks, on the event loop."""
    own = own_addresses()
    later = interfaces.time.monotonic() + interfaces.LOOK_S
    monkeypatch.setattr(interfaces, "every_address", lambda: [("lan", "192.168.7.9", True)])
    assert own_addresses() == own
    monkeypatch.setattr(interfaces, "time", SimpleNamespace(monotonic=lambda: later))
    assert own_addresses() == ("192.168.7.9",)
    assert list(interfaces.address_kinds()) == ["192.168.7.9"]


def test_without_a_free_descriptor_the_last_look_holds(
    monkeypatch: pytest.MonkeyPatch, nine_bridges: list[str]
) -> None:
    none_is_free = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    with monkeypatch.context() as patch:
        patch.setattr(interfaces, "every_address", none_is_free)
        assert (own_addresses(), interfaces.address_kinds()) == ((), {}), "nothing was seen yet"
    own = own_addresses()
    kinds = interfaces.address_kinds()
    assert len(kinds) == 12, "looked at again at once"
    later = interfaces.time.monotonic() + interfaces.LOOK_S
    monkeypatch.setattr(interfaces, "time", SimpleNamespace(monotonic=lambda: later))
    monkeypatch.setattr(interfaces, "every_address", none_is_free)
    assert (own_addresses(), interfaces.address_kinds()) == (own, kinds)
    assert interfaces.is_own("192.168.7.2")


def test_an_address_of_an_own_bridge_is_not_dialled(nine_bridges: list[str]) -> None:
    bridge = nine_bridges[-1]
    told = [f"/ip4/{a}/tcp/7" for a in (bridge, "192.168.7.3", "192.168.7.2")]
    assert without_own_bridges(told, host_of) == told[1:]
    assert without_own_bridges(told[:1], host_of) == told[:1], "a peer on this machine"
    targets = [grpc_target(a) for a in (f"{bridge}:7", "[fd00::3]:7", "nas.lan:7")]
    assert [host_of_target(t) for t in targets] == [bridge, "fd00::3", "nas.lan"]
    assert without_own_bridges(targets, host_of_target) == targets[1:]


def test_bridges_are_not_announced_beside_the_lan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearby, "kind_of", lambda name: BRIDGE)
    alone = nearby._interfaces()[1]
    monkeypatch.setattr(nearby, "kind_of", lambda name: HARDWARE)
    assert nearby._interfaces()[1] == alone, "told where there is nothing better"
    if not alone:
        pytest.skip("no interface here has an address and multicast")
    kinds = iter((HARDWARE, *[BRIDGE] * 99))
    monkeypatch.setattr(nearby, "kind_of", lambda name: next(kinds))
    assert nearby._interfaces()[1] == alone[:1]
