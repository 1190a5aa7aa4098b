import socket
from pathlib import Path

import pytest

from node.reach import gateway
from node.reach.gateway import Gateway, default_gateway, find_gateway

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


def route(
    interface: str, target: str, via: str, flags: int, metric: int, mask: str = "0.0.0.0"
) -> str:
    def number(address: str) -> str:
        return f"{int.from_bytes(socket.inet_aton(address), 'little'):08X}"

    shown = (number(target), number(via), f"{flags:04X}", 0, 0, metric, number(mask), 0, 0, 0)
    return "\t".join(str(f) for f in (interface, *shown)) + "\n"


def test_text_as_the_kernel_writes_it() -> None:
    text = HEAD + (
        "eth0\t00000000\t010AA8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0                        \n"
        "eth0\t000AA8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0                        \n"
    )
    assert default_gateway(text) == "192.168.10.1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEAD,
        HEAD + route("eth0", "192.168.1.0", "0.0.0.0", 1, 0, "255.255.255.0"),
        HEAD + route("ppp0", "0.0.0.0", "0.0.0.0", 1, 0),
        HEAD + route("lo", "0.0.0.0", "127.0.0.1", 3, 0),
        HEAD + route("eth0", "0.0.0.0", "192.168.1.1", 2, 0),
        HEAD + route("eth0", "0.0.0.0", "192.168.1.1", 3, 0, "128.0.0.0"),
        HEAD + "eth0\t00000000\n\nnothing of this is a route at all, not even this\n",
        HEAD + "eth0\tx\t010AA8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n",
    ],
    ids=["empty", "head", "local", "no router", "loopback", "down", "half", "short", "no number"],
)
def test_a_table_without_a_usable_default_route_has_no_gateway(text: str) -> None:
    assert default_gateway(text) is None


def test_the_lowest_metric_wins() -> None:
    routes = [
        route("wlan0", "0.0.0.0", "10.0.0.1", 3, 600),
        route("eth0", "0.0.0.0", "192.168.1.254", 3, 100),
    ]
    assert default_gateway(HEAD + "".join(routes)) == "192.168.1.254"
    assert default_gateway(HEAD + "".join(routes[::-1])) == "192.168.1.254"


def test_the_gateway_is_read_from_the_table_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "route"
    monkeypatch.setattr(gateway, "ROUTES", table)
    monkeypatch.setattr(gateway, "leaves_from", lambda towards: "192.168.1.9")
    assert find_gateway() is None, "no such file: not Linux"
    table.write_text(HEAD + route("eth0", "0.0.0.0", "192.168.1.1", 3, 0))
    assert find_gateway() == Gateway("192.168.1.1", "192.168.1.9")
    monkeypatch.setattr(gateway, "leaves_from", lambda towards: "127.0.0.1")
    assert find_gateway() is None, "loopback is no way to a router"
    table.write_text(HEAD)
    assert find_gateway() is None
