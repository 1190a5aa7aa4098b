import asyncio
import itertools
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.app import daemon
from node.app.joining import PeerBusy, ask_peers, check, choose, examined, invite_text, look
from node.config import NodeConfig
from node.control.diagnose import Diagnosis, NobodyAnswers, failed, identity_in_use, silent
from node.control.retries import ACCEPTED_S, GONE_S, SAY_S, SILENT_S, Busy
from node.core import interrupts
from node.core.errors import ExitCode, NetworkFault, PeerFault, Refused, UsageFault
from node.core.ids import RunId
from node.core.version import PROTOCOL, PROTOCOLS
from node.identity.admission import check_admission
from node.identity.invites import Invite
from node.identity.keys import Identity
from node.manifest import Manifest, amended
from node.telemetry.events import Journal
from protos.ask_pb2 import Answer, ManifestAnswer, PeersAnswer, Refusal
from tests.cli.conftest import Waits, refused

ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/"
OWNER = Identity.ephemeral()


def test_the_swarm_to_start_is_chosen_as_documented(home, ours):
    solo, _ = choose(ours, None)
    assert solo.swarm.owner == Identity.load(home / "identity.key").peer_id
    assert choose(ours, None) == (solo, None)  # the same one the next time

    file = home / "other.toml"
    file.write_bytes(Manifest.default_demo().sign(OWNER))
    place = ADDRESS + OWNER.peer_id
    manifest = Manifest.parse(file.read_bytes())
    invite = Invite(manifest.run_id, OWNER.peer_id, (place,))
    for join in (place, invite.encode()):
        with_join = NodeConfig.load({"home": home, "join": [join]}, {})
        assert choose(with_join, str(file)) == (manifest, invite)

    stranger = Invite(
        solo.run_id.replace(solo.run_id[0], "f" if solo.run_id[0] != "f" else "0"),
        OWNER.peer_id,
        (place,),
    )
    assert choose(ours, stranger.encode()) == (None, stranger), "the daemon must fetch it"

    by_environment = NodeConfig.load(
        {"home": home}, {"TUTTI_SWARM": str(file), "TUTTI_JOIN": place}
    )
    assert choose(by_environment, None) == (manifest, invite)

    rendezvous = NodeConfig.load({"home": home / "r", "role": "rendezvous", "join": [place]}, {})
    assert choose(rendezvous, None) == (None, None)


def a_run(name: str, **changes) -> Manifest:
    fields = {"swarm.name": name} | changes
    base = amended(Manifest.default_demo().owned_by(OWNER.peer_id), fields)
    return Manifest.parse(base.sign(OWNER))


def admitting(run: Manifest, days: float, port: int = 1) -> Invite:
    """An invite into a private run for that many days from now."""
    place = f"/ip4/127.0.0.1/tcp/{port}/p2p/{OWNER.peer_id}"
    return Invite.decode(invite_text(run, (place,), OWNER, days=days))


def test_an_invite_to_a_known_run_is_remembered_for_the_next_start(ours):
    one, two = (a_run(name) for name in ("one", "two"))
    first = Invite(one.run_id, OWNER.peer_id, (ADDRESS + OWNER.peer_id,))
    fresh = Invite(one.run_id, OWNER.peer_id, (f"/ip4/127.0.0.1/tcp/2/p2p/{OWNER.peer_id}",))
    ours.remember(one, first)
    ours.remember(two)
    assert choose(ours, fresh.encode()) == (one, fresh)
    assert choose(ours, None) == (one, fresh)
    with_join = NodeConfig.load({"home": ours.home, "join": [first.encode()]}, {})
    assert choose(with_join, str(ours.manifest_path(one.run_id))) == (one, first)
    assert choose(ours, None) == (one, first)


def test_an_invite_comes_before_the_file_that_the_settings_name(ours, home):
    one, two = (a_run(name) for name in ("one", "two"))
    ours.remember(one)
    home.joinpath("two.toml").write_bytes(two.to_toml())
    invite = Invite(one.run_id, OWNER.peer_id, (ADDRESS + OWNER.peer_id,))
    with_file = NodeConfig.load({"home": home, "swarm": str(home / "two.toml")}, {})
    assert choose(with_file, invite.encode()) == (one, invite)
    assert choose(with_file, None) == (two, None)


def test_a_daemon_started_again_by_its_old_words_uses_the_admission_that_lasts(ours):
    """The owner's fresh invite was remembered while it ran, and is not lost to the old one."""
    Identity.load_or_create(ours.identity_path)
    run = a_run("private", **{"swarm.admission": "invite"})
    old = admitting(run, 1.0)
    fresh = admitting(run, 30.0, port=2)
    ours.remember(run, fresh)
    assert choose(ours, old.encode()) == (run, fresh)
    assert choose(ours, None) == (run, fresh)
    ours.remember(run, old)
    assert choose(ours, fresh.encode()) == (run, fresh)
    for_another = Invite.decode(
        invite_text(run, fresh.addresses, OWNER, Identity.ephemeral().peer_id, days=90.0)
    )
    ours.remember(run, for_another)
    assert choose(ours, old.encode()) == (run, old)


def test_a_fresh_invite_to_the_run_of_the_daemon_is_stored_while_it_runs(tutti, daemon, ours):
    Identity.load_or_create(ours.identity_path)
    run = a_run("private", **{"swarm.admission": "invite"})
    ours.remember(run, admitting(run, 1.0))
    daemon.said.swarm.run_id = run.run_id
    fresh = admitting(run, 30.0)
    shown = tutti("join", fresh.encode())
    assert (shown.returncode, shown.stdout) == (0, "")
    assert "tutti restart" in shown.stderr
    assert ours.remembered() == (run, fresh)
    for other in (
        admitting(run, -1.0),
        Invite.decode(
            invite_text(run, fresh.addresses, OWNER, Identity.ephemeral().peer_id, days=90.0)
        ),
    ):
        refused(tutti("join", other.encode()), ExitCode.REFUSED, "does not admit this peer")
    assert ours.remembered() == (run, fresh)
    two = a_run("two")
    invite = Invite(two.run_id, OWNER.peer_id, fresh.addresses)
    refused(tutti("join", invite.encode(), "--yes"), ExitCode.REFUSED, "already running")
    assert not daemon.stopped.is_set()


def test_a_manifest_from_a_stranger_must_be_the_invited_one(ours, monkeypatch):
    thief = Identity.ephemeral()
    real, fake = (Manifest.default_demo().sign(who) for who in (OWNER, thief))
    invite = Invite(Manifest.parse(real).run_id, OWNER.peer_id, (ADDRESS + thief.peer_id,)).encode()

    def answers(raw: bytes) -> None:
        monkeypatch.setattr(
            "node.app.joining.observe", lambda *_: Answer(manifest=ManifestAnswer(toml=raw))
        )

    answers(real)
    assert look(ours, invite) == (Manifest.parse(real), Invite.decode(invite))
    for wrong in (
        fake,
        real.replace(b"# epochs = 120", b"epochs = 121"),
        Manifest.parse(real).owned_by(OWNER.peer_id).to_toml(),
    ):
        answers(wrong)
        with pytest.raises(Refused):
            look(ours, invite)


def test_only_the_owner_invites_into_a_private_swarm():
    guest = Identity.ephemeral()
    private = Manifest.parse(
        amended(Manifest.default_demo(), {"swarm.admission": "invite"}).sign(OWNER)
    )
    places = (ADDRESS + OWNER.peer_id,)
    assert Invite.decode(invite_text(private, places, OWNER)).admission
    with pytest.raises(Refused, match="not its owner"):
        invite_text(private, places, guest)
    open_one = Manifest.parse(Manifest.default_demo().sign(OWNER))
    assert not Invite.decode(invite_text(open_one, places, guest)).admission


def test_a_private_swarm_is_asked_as_the_admitted_peer(ours, monkeypatch):
    me = Identity.load_or_create(ours.identity_path)
    private = Manifest.parse(
        amended(
            Manifest.default_demo().owned_by(OWNER.peer_id), {"swarm.admission": "invite"}
        ).sign(OWNER)
    )
    places = (ADDRESS + OWNER.peer_id,)
    asked = []
    answers = {
        "manifest": Answer(manifest=ManifestAnswer(toml=private.to_toml())),
        "peers": Answer(peers=PeersAnswer()),
    }

    def observed(places, question, seed, within_s=0.0):
        asked.append((question, Identity(Ed25519PrivateKey.from_private_bytes(seed), None)))
        return answers[question.WhichOneof("question")]

    monkeypatch.setattr("node.app.joining.observe", observed)
    for guest in (None, me.peer_id):
        text = invite_text(private, places, OWNER, guest)
        look(ours, text)
        ask_peers(ours, text)
        for question, asker in asked:
            token = question.manifest.admission or question.peers.admission
            check_admission(
                token,
                run_id=private.run_id,
                owner=OWNER.peer_id,
                peer=asker.peer_id,
                now_wall=time.time(),
            )
            assert (asker.peer_id == me.peer_id) is (guest is not None)
        assert len(asked) == 2
        asked.clear()


def test_before_the_start_clock_and_identity_are_looked_at(network, ours):
    place = ADDRESS + OWNER.peer_id
    invite = Invite(RunId("ab" * 32), OWNER.peer_id, (place,))
    asked = network(Diagnosis(place, "answer", True, "answered", clock_s=-3600.0))
    with pytest.raises(Refused, match="1h00m behind") as caught:
        check(ours, invite, 3.0)
    assert caught.value.code is ExitCode.CLOCK_WRONG
    # this home has no key yet
    how = {"me": None, "first": True, "seconds": 3.0, "admission": b"", "seed": asked[0][1]["seed"]}
    assert asked == [((place,), how)]

    me = Identity.load_or_create(ours.identity_path).peer_id
    asked = network(Diagnosis(place, "answer", True, "answered"), identity_in_use(me, "it answers"))
    with pytest.raises(Refused, match="in use elsewhere") as caught:
        check(ours, invite)
    assert caught.value.code is ExitCode.IDENTITY_IN_USE
    assert asked[0][1]["me"] == me

    network(silent(place, 3.0))
    check(ours, invite)  # nobody there: the daemon goes on looking


def test_join_does_not_ask_about_the_key_of_a_local_daemon(ours, daemon, network):
    asked = network()
    Identity.load_or_create(ours.identity_path)
    check(ours, Invite(RunId("ab" * 32), OWNER.peer_id, (ADDRESS + OWNER.peer_id,)))
    assert [how["me"] for _, how in asked] == [None]


def test_the_addresses_to_examine_are_those_given_or_remembered(ours, network):
    asked = network()
    manifest = Manifest.parse(Manifest.default_demo().sign(OWNER))
    one, two, three = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{OWNER.peer_id}" for port in (1, 2, 3))
    examined(ours, ())
    ours.remember(manifest, Invite(manifest.run_id, OWNER.peer_id, (one,)))
    examined(ours, ())
    examined(ours, (Invite(manifest.run_id, OWNER.peer_id, (two,)).encode().upper(), three))
    assert [addresses for addresses, _ in asked] == [[], [one], [two, three]]
    with pytest.raises(UsageFault, match="neither"):
        examined(ours, ("swarm.toml",))


def _seeker(ours, monkeypatch, ask, links=()):
    """A daemon that looks for its manifest, in no time."""
    seeker = daemon.Daemon.__new__(daemon.Daemon)
    transport = SimpleNamespace(
        learn=lambda *_: None, ask=ask, p2p=SimpleNamespace(links=dict.fromkeys(links, ()))
    )
    journal = Journal()
    vars(seeker).update(config=ours, transport=transport, admission=lambda _: b"", journal=journal)
    waits = Waits()

    async def sleep(seconds):
        waits.sleep(seconds)

    monkeypatch.setattr(daemon, "time", waits)
    monkeypatch.setattr(daemon, "asyncio", SimpleNamespace(gather=asyncio.gather, sleep=sleep))
    seeker.waits = waits
    return seeker


async def test_one_bad_answer_does_not_end_the_search(ours, monkeypatch):
    good, fake = (Manifest.default_demo().sign(who) for who in (OWNER, Identity.ephemeral()))

    def gives(toml, oldest=PROTOCOL):
        return Answer(
            manifest=ManifestAnswer(toml=toml), oldest_protocol=oldest, newest_protocol=PROTOCOL
        )

    bad = gives(b"["), gives(fake), gives(good, PROTOCOL + 1)
    said = {Identity.ephemeral().peer_id: itertools.repeat(answer) for answer in bad}
    said[OWNER.peer_id] = iter((None, gives(good)))

    async def ask(peer, question):
        if answer := next(said[peer]):
            return answer
        raise PeerFault(peer, "no answer")

    seeker = _seeker(ours, monkeypatch, ask)
    manifest = Manifest.parse(good)
    invite = Invite(manifest.run_id, OWNER.peer_id, tuple(ADDRESS + peer for peer in said))
    assert await seeker._find_manifest(invite) == manifest
    assert ours.remembered() == (manifest, invite)
    said[OWNER.peer_id] = itertools.repeat(bad[0])
    with pytest.raises(Refused, match="is of run"):
        await seeker._find_manifest(invite)


async def test_a_daemon_waits_for_the_manifest_as_long_as_somebody_is_there(ours, monkeypatch):
    toml = Manifest.default_demo().sign(OWNER)
    manifest = Manifest.parse(toml)
    busy = [Answer(refusal=Refusal(code=7, again_s=6.0, place=n)) for n in range(60, 0, -1)]
    versions = Answer(oldest_protocol=PROTOCOL, newest_protocol=PROTOCOL)
    answers = iter([None, None, *busy, None, Answer(manifest=ManifestAnswer(toml=toml))])

    async def ask(peer, question):
        if answer := next(answers):
            answer.MergeFrom(versions)
            return answer
        raise PeerFault(peer, "no answer in 10 s")

    invite = Invite(manifest.run_id, OWNER.peer_id, (ADDRESS + OWNER.peer_id,))
    seeker = _seeker(ours, monkeypatch, ask, links=[OWNER.peer_id])
    assert await seeker._find_manifest(invite) == manifest
    assert seeker.waits.now > 60 * 6 * 0.75
    said = [e.text for e in seeker.journal.recent() if e.kind == "waiting-to-join"]
    assert "about 60th" in said[1]
    assert len(said) < 50

    async def silent(peer, question):
        raise PeerFault(peer, "no answer in 10 s")

    seeker = _seeker(ours, monkeypatch, silent)
    with pytest.raises(NetworkFault, match="none of 1 peer of the invite answered"):
        await seeker._find_manifest(invite)
    assert SILENT_S <= seeker.waits.now < 2 * SILENT_S


class Founder:
    """Answers in turn as told: an answer, or a fault that is raised."""

    def __init__(self, monkeypatch, *answers):
        self._answers = iter(answers)
        self.asked = []
        monkeypatch.setattr("node.app.joining.observe", self)

    def __call__(self, places, question, seed=None, within_s=0.0):
        self.asked.append((seed, within_s))
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


TOML = Manifest.default_demo().sign(OWNER)
PLACE = ADDRESS + OWNER.peer_id
INVITE = Invite(Manifest.parse(TOML).run_id, OWNER.peer_id, (PLACE,)).encode()
YES = Answer(manifest=ManifestAnswer(toml=TOML))


def busy(place, again_s=6.0):
    return PeerBusy(PLACE, Busy(place, again_s))


def unanswered(layer, seconds=7.5):
    return NobodyAnswers([silent(PLACE, seconds, layer)])


def test_a_joiner_waits_in_the_queue_and_is_told_of_it(ours, monkeypatch, waits, capsys):
    places = [busy(n, again_s=2.0) for n in range(40, 0, -1)]
    founder = Founder(monkeypatch, *places, YES)
    assert look(ours, INVITE)[0] == Manifest.parse(TOML)
    assert waits.now == pytest.approx(sum(waits.pauses))
    assert all(1.5 <= pause <= 3.0 for pause in waits.pauses)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "waiting since 12:00:00: the swarm is busy, about 40th in its queue; asking again in about "
        "2 s   (Ctrl-C ends it)"
    )
    assert 3 <= len(said) <= waits.now / SAY_S + 2, "as its place changes, and no flood"
    assert said[-1] == f"answered after {waits.now:.0f} s"
    assert len({seed for seed, _ in founder.asked}) == 1, "its place is that of its key"


def test_a_stop_ends_the_wait_of_a_program_that_has_replaced_another(ours, monkeypatch, waits):
    blocked = []

    def observed(*_):
        blocked.append(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return YES

    monkeypatch.setattr("node.app.joining.observe", observed)
    try:
        interrupts.block(signal.SIGTERM)
        look(ours, INVITE)
    finally:
        interrupts.unblock(signal.SIGTERM, signal.SIGINT)
    assert blocked == [False]


def test_a_founder_that_is_slow_gets_more_time(ours, monkeypatch, waits, capsys):
    slow = [unanswered("proof"), unanswered("answer"), unanswered("answer"), busy(3)]
    founder = Founder(monkeypatch, *slow, YES)
    look(ours, INVITE)
    assert [within for _, within in founder.asked[:4]] == [7.5, 15.0, 30.0, 60.0]
    said = capsys.readouterr().err.splitlines()
    assert "does not prove who it is" in said[0]
    assert len(said) == 3


def test_joining_ends_only_where_nobody_answers_anybody(ours, monkeypatch, waits, capsys):
    def ends(*answers, took=0.0):
        waits.now = 0.0
        waits.woken = lambda: setattr(waits, "now", waits.now + took)
        Founder(monkeypatch, *answers[:-1], *itertools.repeat(answers[-1], 1000))
        with pytest.raises(NetworkFault) as caught:
            look(ours, INVITE)
        return caught.value, waits.now

    wrong_port = NobodyAnswers(
        [failed(PLACE, "proof", ExitCode.OTHER_SERVICE, "a web server answers there")]
    )
    fault, seconds = ends(wrong_port)
    assert (fault.code, seconds) == (ExitCode.OTHER_SERVICE, 0.0), "at once: the address is wrong"

    fault, seconds = ends(unanswered("connect"), took=7.5)
    assert fault.code is ExitCode.NO_ANSWER
    assert SILENT_S <= seconds < 2 * SILENT_S

    fault, seconds = ends(unanswered("proof"), took=7.5)
    assert fault.code is ExitCode.NETWORK
    assert ACCEPTED_S <= seconds < 2 * ACCEPTED_S
    assert "somebody is there and answers nothing for 2m" in fault.what
    assert "check the address" not in fault.next_step
    assert "tutti status" in fault.next_step

    fault, seconds = ends(busy(2), unanswered("connect"), took=7.5)
    assert "no sign of life for 1m" in fault.what
    assert GONE_S <= seconds < 2 * GONE_S
    assert capsys.readouterr().err.count("waiting since") == 4


def test_ctrl_c_ends_the_wait(ours, monkeypatch, waits, tutti):
    Founder(monkeypatch, *itertools.repeat(busy(17), 9))

    def interrupt():
        raise KeyboardInterrupt

    waits.woken = interrupt
    shown = tutti("join", INVITE, "--yes")
    assert shown.returncode == 130
    assert shown.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in shown.stderr


def test_a_caller_that_only_looks_is_told_that_the_peer_is_busy(ours, monkeypatch, tutti):
    monkeypatch.setitem(
        sys.modules,
        "node.control.observer",
        SimpleNamespace(
            ask_first=lambda *_: Answer(
                refusal=Refusal(code=7, reason="busy", again_s=6.4, place=17)
            ),
            protocols_of=lambda _: PROTOCOLS,
        ),
    )
    shown = tutti("peers", "--join", PLACE)
    assert shown.returncode == ExitCode.RESOURCES
    assert f"{PLACE} is busy; this is number 17 in its queue" in shown.stderr
    assert "ask again in 6 s" in shown.stderr


def test_joining_by_the_address_of_a_rendezvous_tells_how_to_name_the_run(monkeypatch, tutti):
    refusal = Refusal(code=ExitCode.PROTOCOL, reason="this peer is a rendezvous without a run")
    monkeypatch.setitem(
        sys.modules,
        "node.control.observer",
        SimpleNamespace(
            ask_first=lambda *_: Answer(refusal=refusal), protocols_of=lambda _: PROTOCOLS
        ),
    )
    shown = tutti("start", "--join", PLACE)
    assert shown.returncode == ExitCode.REFUSED
    assert "this peer is a rendezvous without a run" in shown.stderr
    for step in ("tutti start FILE --join ADDRESS", "tutti swarm invite"):
        assert step in shown.stderr
