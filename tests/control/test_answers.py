"""Answers to strangers over libp2p: the manifest and the peers of an open run, nothing of a private
one."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from node.app.operator_service import OperatorService
from node.core.errors import ExitCode, LocalFault, Refused, UsageFault
from node.identity.admission import Gate, admission_token, shown
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from protos.ask_pb2 import Ask, AskManifest, AskPeers, PeerLine, PeersAnswer
from testbed.fakes.clock import VirtualClock

OWNER, GUEST, STRANGER = (Identity.ephemeral() for _ in range(3))


def view(private: bool) -> tuple[OperatorService, Manifest]:
    base = Manifest.default_demo().owned_by(OWNER.peer_id)
    manifest = Manifest.parse(
        amended(base, {"swarm.admission": "invite" if private else "open"}).sign(OWNER)
    )
    gate = Gate(manifest.run_id, OWNER.peer_id, private)
    daemon: Any = SimpleNamespace(manifest=manifest, clock=VirtualClock(), gate=gate, orders=None)
    made = OperatorService(daemon)
    line = PeerLine(peer="12D3KooWHidden", name="shy-otter")
    made.peers_in_sight = lambda: PeersAnswer(peers=[line])  # type: ignore[method-assign]
    return made, manifest


async def test_an_open_run_answers_everybody() -> None:
    open_, manifest = view(private=False)
    assert (await open_.answer(STRANGER.peer_id, Ask(peers=AskPeers()))).peers.peers[
        0
    ].name == "shy-otter"
    answer = await open_.answer(STRANGER.peer_id, Ask(manifest=AskManifest(run_id=manifest.run_id)))
    assert Manifest.parse(answer.manifest.toml) == manifest
    with pytest.raises(LocalFault) as unknown:
        await open_.answer(STRANGER.peer_id, Ask(manifest=AskManifest(run_id="0" * 64)))
    assert unknown.value.code is ExitCode.PROTOCOL
    assert unknown.value.what == "this peer takes part in another run"


@pytest.mark.parametrize(("role", "says"), [("rendezvous", "a rendezvous"), ("auto", "not know")])
async def test_a_peer_without_a_run_says_why_it_has_no_manifest(role: str, says: str) -> None:
    daemon: Any = SimpleNamespace(manifest=None, role=role, clock=VirtualClock())
    with pytest.raises(LocalFault, match=says) as nothing:
        await OperatorService(daemon).answer(STRANGER.peer_id, Ask(manifest=AskManifest()))
    assert nothing.value.code is ExitCode.PROTOCOL


async def test_a_listed_peer_is_called_first_one_at_a_time() -> None:
    open_, _ = view(private=False)
    calls = list[str]()
    there = asyncio.Event()

    async def call(peer: str, question: Ask, timeout: float) -> None:
        calls.append(peer)
        await there.wait()

    open_._d.transport = SimpleNamespace(ask=call)  # type: ignore[assignment]

    async def called(peer: str) -> bool:
        question = Ask(peers=AskPeers(call=peer))
        return (await open_.answer(STRANGER.peer_id, question)).peers.called

    assert not await called("12D3KooWOther"), "nobody who is not listed is called"
    first = asyncio.ensure_future(called("12D3KooWHidden"))
    await asyncio.sleep(0)
    assert not await called("12D3KooWHidden"), "the first call is under way"
    there.set()
    assert await first
    assert calls == ["12D3KooWHidden"]


async def test_a_private_run_answers_only_a_peers_own_token() -> None:
    private, manifest = view(private=True)
    grant = admission_token(OWNER, manifest.run_id, None, private._d.clock.wall() + 60)
    token = shown(grant, GUEST, manifest.run_id)
    for asked in (
        Ask(peers=AskPeers(admission=token)),
        Ask(manifest=AskManifest(run_id=manifest.run_id, admission=token)),
        Ask(manifest=AskManifest(admission=token)),
    ):
        assert (await private.answer(GUEST.peer_id, asked)).WhichOneof("answer") in (
            "peers",
            "manifest",
        )
        with pytest.raises(Refused) as refused:
            await private.answer(STRANGER.peer_id, asked)
        told = f"{refused.value.what} {refused.value.next_step}"
        assert refused.value.code is ExitCode.REFUSED
        for secret in (
            "shy-otter",
            "12D3KooWHidden",
            manifest.run_id,
            manifest.run_id[:12],
            manifest.swarm.name,
            "/ip4",
            OWNER.peer_id,
        ):
            assert secret not in told
    for bare in (
        Ask(peers=AskPeers()),
        Ask(manifest=AskManifest()),
        Ask(peers=AskPeers(admission=grant)),
    ):
        with pytest.raises(Refused):
            await private.answer(GUEST.peer_id, bare)
    assert (await private.answer(OWNER.peer_id, Ask(peers=AskPeers()))).peers.peers


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/1/p2p/nobody"])
async def test_ping_refuses_an_address_of_no_peer(address: str) -> None:
    open_, _ = view(private=False)
    learnt = list[str]()
    learn = SimpleNamespace(learn=lambda peer, addresses: learnt.append(peer))
    open_._d.presence, open_._d.transport = None, learn  # type: ignore[assignment]
    with pytest.raises(UsageFault, match="address"):
        await open_.ping(address, 1)
    assert not learnt
