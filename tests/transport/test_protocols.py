"""Two peers speak the newest protocol version that both know; without one both sides are told why.

Every meeting here is a real handshake between two p2pd on loopback.
"""

import dataclasses

import pytest

from node.core.errors import PeerFault, WireError
from node.core.version import PROTOCOLS, Protocols
from node.transport.handshake import IncompatiblePeer
from protos import ask_pb2
from tests.transport.conftest import introduce, until


def mismatches(transport) -> list:
    return [e for e in transport._journal.recent() if e.kind == "protocol-mismatch"]


async def has_met(transport, other) -> None:
    """Wait until `transport` has noted the call of `other`, which it does after its answer was
    sent."""
    await until(lambda: other.peer_id in transport._met, 10)


@pytest.mark.parametrize(
    ("here", "there", "agreed"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 4), 3), ((2, 4), (1, 3), 3), ((1, 9), (4, 4), 4)],
)
async def test_two_peers_speak_the_newest_that_both_do(swarm, here, there, agreed):
    a, b = introduce(*[await swarm(protocols=Protocols(*window)) for window in (here, there)])
    await a.channel(b.peer_id)
    await has_met(b, a)
    assert (a._met[b.peer_id].protocol, b._met[a.peer_id].protocol) == (agreed, agreed)
    assert mismatches(a) == mismatches(b) == []


@pytest.mark.parametrize(("here", "there"), [((1, 2), (3, 4)), ((3, 4), (1, 2))])
async def test_without_a_common_version_both_name_who_must_update(swarm, here, there):
    a, b = introduce(*[await swarm(protocols=Protocols(*window)) for window in (here, there)])
    for _ in range(3):
        with pytest.raises(PeerFault, match="protocols") as fault:
            await a.channel(b.peer_id)
        assert fault.value.weight == 0
    assert not b._tokens.knows(a.peer_id)
    (at_a,) = mismatches(a)
    (at_b,) = mismatches(b)
    for event, mine, theirs, peer in ((at_a, here, there, b), (at_b, there, here, a)):
        assert event.fields["peer"] == peer.peer_id
        assert (event.fields["oldest"], event.fields["newest"]) == theirs
        assert f"speaks protocols {theirs[0]} to {theirs[1]} (tutti 0)" in event.text
        assert ("update this tutti" in event.text) == (mine < theirs)
        assert "tutti upgrade" in event.text


async def test_a_peer_that_was_updated_is_met_at_once(swarm):
    a, b = introduce(*[await swarm(protocols=Protocols(only, only)) for only in (2, 1)])
    with pytest.raises(PeerFault, match="protocol 1"):
        await a.channel(b.peer_id)
    with pytest.raises(IncompatiblePeer):
        await a.channel(b.peer_id)
    updated = dataclasses.replace(b._facts(), version="1", protocols=Protocols(1, 2))
    b._handshake._facts = lambda: updated
    b._incompatible.clear()  # it is a new process
    await b.channel(a.peer_id)
    await has_met(a, b)
    await a.channel(b.peer_id)
    assert a._met[b.peer_id].protocol == 2


async def test_every_answer_carries_the_protocol_versions(swarm):
    a = await swarm()
    b = await swarm(protocols=Protocols(4, 6), run="")
    for question in (
        ask_pb2.Ask(ping=ask_pb2.AskPing(nonce=b"now")),
        ask_pb2.Ask(manifest=ask_pb2.AskManifest()),
    ):
        said = await a.ask(b.p2p.addresses()[0], question)
        assert (said.oldest_protocol, said.newest_protocol, said.version) == (4, 6, "0")


def test_windows_are_compared_by_both_ends():
    assert Protocols.said(0, 0) == Protocols.said(1, 0) == Protocols(1, 1)
    assert Protocols.said(2, 5) == Protocols(2, 5)
    assert (str(Protocols(2, 2)), str(Protocols(1, 3))) == ("protocol 2", "protocols 1 to 3")
    assert not PROTOCOLS.common(Protocols.said(0, 0)), "plans of older ones do not say who votes"


@pytest.mark.parametrize(("oldest", "newest"), [(3, 2), (1, 1 << 16), (0, 1 << 20)])
def test_a_window_of_versions_that_is_none_is_refused(oldest: int, newest: int):
    with pytest.raises(WireError):
        Protocols.said(oldest, newest)
