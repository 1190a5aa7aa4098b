"""Admission: a token opens one door for one peer; a grant makes such tokens and never shows
itself."""

import math
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import Refused, WireError
from node.core.ids import PeerId, RunId
from node.identity import admission
from node.identity.admission import (
    MAX_ADMISSION,
    Gate,
    admission_token,
    check_admission,
    ends_at,
    is_grant,
    key_of,
    shown,
)
from node.identity.invites import Invite
from node.identity.keys import Identity

OWNER, GUEST, STRANGER = (Identity.ephemeral() for _ in range(3))
RUN = RunId("0123456789abcdef" * 4)
OTHER_RUN = RunId("f" * 64)
NOW = 1_700_000_000.0
TOKEN = admission_token(OWNER, RUN, GUEST.peer_id, NOW + 60)
GRANT = admission_token(OWNER, RUN, None, NOW + 60)


def check(
    token: bytes,
    *,
    run: RunId = RUN,
    owner: Identity = OWNER,
    peer: Identity = GUEST,
    now: float = NOW,
) -> float:
    about: Any = {"run_id": run, "owner": owner.peer_id, "peer": peer.peer_id}
    return check_admission(token, **about, now_wall=now).until


MADE = shown(GRANT, GUEST, RUN)


@pytest.mark.parametrize("token", [TOKEN, MADE], ids=["for a peer", "from a grant"])
def test_a_token_admits_its_peer_to_its_run_for_its_time(token: bytes) -> None:
    assert check(token) == check(token, now=NOW + 59.9) == NOW + 60


@pytest.mark.parametrize(
    ("token", "more", "says"),
    [
        *((token, {"now": NOW + 60}, "expired") for token in (TOKEN, MADE)),
        *((token, {"peer": STRANGER}, "another peer") for token in (TOKEN, MADE)),
        *((token, {"run": OTHER_RUN}, "not signed") for token in (TOKEN, MADE)),
        *((token, {"owner": STRANGER}, "not signed") for token in (TOKEN, MADE)),
        (MADE, {"peer": OWNER}, "another peer"),
        (GRANT, {}, "no admission token"),
        (b"", {}, "private"),
        # A grant is for one run.
        (shown(GRANT, GUEST, OTHER_RUN), {"run": OTHER_RUN}, ""),
        (shown(GRANT, GUEST, OTHER_RUN), {}, ""),
        # Only the owner signs tokens.
        (admission_token(GUEST, RUN, GUEST.peer_id, NOW + 60), {}, "not signed"),
        (shown(admission_token(GUEST, RUN, None, NOW + 60), GUEST, RUN), {}, "not signed"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,
)
def test_any_other_token_is_refused_with_the_reason(token: bytes, more, says: str) -> None:
    with pytest.raises(Refused, match=says or None):
        check(token, **more)


def test_a_token_and_a_grant_say_when_they_end() -> None:
    assert ends_at(TOKEN) == ends_at(GRANT) == ends_at(shown(GRANT, GUEST, RUN)) == NOW + 60
    assert ends_at(b"") == ends_at(TOKEN[:-1]) == ends_at(b"x" * 600) == 0.0


def test_a_grant_makes_a_token_for_its_holder_and_is_no_token() -> None:
    assert is_grant(GRANT)
    assert not is_grant(TOKEN)
    for guest in (GUEST, STRANGER):
        made = shown(GRANT, guest, RUN)
        check(made, peer=guest)
        assert GRANT[9:41] not in made, "what is shown must not let its reader make tokens"
    assert shown(TOKEN, STRANGER, RUN) == TOKEN
    assert shown(b"", GUEST, RUN) == b""


def test_no_token_is_made_of_what_is_no_time_or_no_peer() -> None:
    with pytest.raises(ValueError, match="time"):
        admission_token(OWNER, RUN, None, math.inf)
    with pytest.raises(WireError):
        admission_token(OWNER, RUN, PeerId("nobody"), NOW)


@given(st.sampled_from([TOKEN, MADE]), st.data())
def test_no_bit_of_a_token_may_change(token: bytes, data: st.DataObject) -> None:
    raw = bytearray(token)
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Refused):
        check(bytes(raw))


@given(
    st.binary(max_size=200)
    | st.binary(max_size=2).flatmap(lambda b: st.sampled_from([b + bytes(105), b + bytes(169)]))
)
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(Refused):
        check(shown(raw, GUEST, RUN))


def test_admissions_fit_an_invite_and_a_record() -> None:
    here = f"/ip4/203.0.113.9/tcp/31337/p2p/{OWNER.peer_id}"
    for given_ in (TOKEN, GRANT):
        invite = Invite(RUN, OWNER.peer_id, (here,), given_).encode()
        made = shown(Invite.decode(invite).admission, GUEST, RUN)
        check(made)
        assert len(made) <= MAX_ADMISSION


def test_the_gate_checks_a_token_once_and_its_time_always(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(RUN, OWNER.peer_id, True)
    counted = Mock(side_effect=check_admission)
    monkeypatch.setattr(admission, "check_admission", counted)
    for now in (NOW, NOW + 1, NOW + 59):
        assert gate.admit(GUEST.peer_id, TOKEN, now) == NOW + 60
    assert counted.call_count == 1
    with pytest.raises(Refused):
        gate.admit(STRANGER.peer_id, TOKEN, NOW)
    with pytest.raises(Refused, match="expired"):
        gate.admit(GUEST.peer_id, TOKEN, NOW + 60)
    monkeypatch.setattr(admission, "KEPT", 2)
    gate = Gate(RUN, OWNER.peer_id, True)
    for one in [Identity.ephemeral() for _ in range(4)]:
        gate.admit(one.peer_id, shown(GRANT, one, RUN), NOW)
    assert len(gate._known) == 2


def test_a_peer_that_may_lead_an_open_run_shows_a_token() -> None:
    gate = Gate(RUN, OWNER.peer_id, private=False, chosen=True)
    for peer, token in ((GUEST, TOKEN), (STRANGER, TOKEN), (STRANGER, b"")):
        assert gate.admit(peer.peer_id, token, NOW) == math.inf, "everybody takes part"
    assert gate.may_lead(OWNER.peer_id, NOW)
    assert gate.may_lead(GUEST.peer_id, NOW)
    assert not gate.may_lead(GUEST.peer_id, NOW + 61), "until it expires"
    assert not gate.may_lead(STRANGER.peer_id, NOW)
    assert Gate(RUN, OWNER.peer_id, private=False).may_lead(STRANGER.peer_id, NOW)


def test_the_gate_refuses_a_revoked_peer_and_every_key_of_a_revoked_invite() -> None:
    gate = Gate(RUN, OWNER.peer_id, True)
    revoked = set[PeerId]()
    gate.revoked = revoked.__contains__
    again = Identity.ephemeral()
    for one in (GUEST, again):
        assert gate.admit(one.peer_id, shown(GRANT, one, RUN), NOW) == NOW + 60
        assert gate.invite_of(one.peer_id) == key_of(GRANT)
    revoked.add(GUEST.peer_id)
    for token in (TOKEN, MADE):
        with pytest.raises(Refused, match="has revoked this peer"):
            gate.admit(GUEST.peer_id, token, NOW)
    assert gate.admit(again.peer_id, shown(GRANT, again, RUN), NOW) == NOW + 60
    revoked.add(key_of(GRANT))
    for one in (again, STRANGER):
        with pytest.raises(Refused, match="has revoked the invite"):
            gate.admit(one.peer_id, shown(GRANT, one, RUN), NOW)
    other = admission_token(OWNER, RUN, None, NOW + 60)
    for fresh in (other, admission_token(OWNER, RUN, again.peer_id, NOW + 60)):
        assert gate.admit(again.peer_id, shown(fresh, again, RUN), NOW) == NOW + 60
    assert gate.invite_of(again.peer_id) is None, "the last token was for this peer alone"
    assert gate.admit(OWNER.peer_id, b"", NOW) == math.inf


def test_who_is_revoked_or_came_with_a_revoked_invite_may_not_lead() -> None:
    gate = Gate(RUN, OWNER.peer_id, private=False, chosen=True)
    for one, token in ((GUEST, TOKEN), (STRANGER, shown(GRANT, STRANGER, RUN))):
        for revoked in (one.peer_id, gate.invite_of(one.peer_id) or key_of(GRANT)):
            gate.revoked = lambda key: False
            gate.admit(one.peer_id, token, NOW)
            assert gate.may_lead(one.peer_id, NOW)
            gate.revoked = revoked.__eq__
            assert gate.may_lead(one.peer_id, NOW) is (token == TOKEN and revoked != one.peer_id)
