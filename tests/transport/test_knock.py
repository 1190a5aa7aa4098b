"""A knock at addresses: which are dialled, and which are left alone for now."""

import itertools
import socket

import pytest

from node.reach.knock import refused


@pytest.fixture
def closed() -> str:
    """A multiaddr where nobody listens."""
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        return f"/ip4/127.0.0.1/tcp/{gone.getsockname()[1]}"


@pytest.mark.parametrize("more", ["", "/p2p/12D3KooW"])
async def test_a_port_where_nobody_listens_refuses(closed: str, more: str) -> None:
    assert await refused([closed + more])
    assert await refused([closed + more, closed])
    assert not await refused([]), "nobody was asked"


async def test_one_address_that_takes_connections_is_enough(closed: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as here:
        taken = f"/ip4/127.0.0.1/tcp/{here.getsockname()[1]}"
        assert not await refused([closed, taken])


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/127.0.0.1/udp/9/quic",
        "{closed}/ws",
        "{closed}/p2p/12D3KooW/p2p-circuit",
        "/ip4/127.0.0.1",
        "/dns4/localhost/tcp/9",
        "/dns4/" + 70 * "a" + "/tcp/9",
        "/ip6zone/lo/ip6/::1/tcp/9",
        "/ip4/127.0.0.1/tcp/0",
        "/ip4/127.0.0.1/tcp/99999",
        "/ip4/127.0.0.1/tcp/-1",
        "/ip4/127.0.0.1/tcp/" + 5000 * "9",
        "/ip4/127.0.0.1/tcp/x",
        "/ip4/" + 70 * "a" + "/tcp/9",
        "/ip4/\0/tcp/9",
        "",
    ],
    ids=itertools.count(),
)
async def test_what_is_no_plain_tcp_is_left_to_p2pd(closed: str, address: str) -> None:
    assert not await refused([address.format(closed=closed)])
