"""Networks that are broken in eight ways: a peer that cannot join is told in time which way it
is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.core.errors import ExitCode
from testbed.daemons import impatient
from testbed.daemons.forks import Forks
from testbed.networks.internet import why_not
from testbed.swarms.broken import CASES, PORT, BrokenLab, Case

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

LIMIT_S = 30.0
"""Longest time in s of a command, as the command itself measures it. It ends by a bound of its own
of 9.5 s, to which a busy machine adds some; a wait without a bound would add a minute."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[BrokenLab]:
    if reason := why_not():
        pytest.skip(reason)
    with BrokenLab(tmp_path_factory.mktemp("broken"), forks, impatient.MODULE) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_broken_network_has_its_own_cause_and_exit_code(lab: BrokenLab, case: Case) -> None:
    joined, examined = case.run(lab)
    assert joined.code == case.code, joined.stderr
    assert examined.code == case.code, examined.stdout + examined.stderr
    found = examined.document
    assert found["verdict"]["code"] == case.code
    assert found["seconds"] <= LIMIT_S
    assert "\ntutti: " in "\n" + joined.stderr
    assert found["verdict"]["fix"]
    assert found["verdict"]["fix"] in joined.stderr
    for words in case.says:
        assert words in joined.stderr
        assert words in examined.stdout


def works(lab: BrokenLab, home: Path) -> dict[str, Any]:
    joined, examined = lab.both("joiner", home, lab.invite())
    assert joined.code == 0, joined.stderr
    assert (home / "swarms").exists()
    assert examined.code == 0, examined.stdout + examined.stderr
    found = examined.document
    assert found["seconds"] <= LIMIT_S
    return found


def test_an_invite_that_works_is_found_to_work(lab: BrokenLab) -> None:
    found = works(lab, lab.home("fine"))
    assert ([f["ok"] for f in found["findings"]], found["verdict"]["code"]) == ([True, True], 0)
    assert abs(found["machine"]["clock_s"]) < 60
    assert found["machine"]["routes"] == {
        "ipv4": lab.net["joiner"].address,
        "ipv6": lab.net["joiner"].address6,
    }


def test_quic_carries_a_joiner_where_tcp_is_dropped(lab: BrokenLab) -> None:
    with lab.dropping("input meta l4proto tcp drop"):
        found = works(lab, lab.home("quic"))
    assert [f["layer"] for f in found["findings"]] == ["connect", "answer"]


def test_udp_that_is_dropped_is_a_warning_where_tcp_works(lab: BrokenLab) -> None:
    with lab.dropping("input meta l4proto udp drop"):
        found = works(lab, lab.home("warned"))
    assert (found["verdict"]["ok"], found["verdict"]["code"]) == (True, ExitCode.UDP_BLOCKED)


def test_nothing_is_remembered_of_a_swarm_that_was_not_joined(lab: BrokenLab) -> None:
    home = lab.home("forgotten")
    joined, _ = lab.both("joiner", home, lab.invite(lab.address(f"tcp/{PORT + 2}")))
    assert joined.code == ExitCode.PORT_CLOSED
    assert not (home / "swarms").exists()


def test_the_key_of_the_very_peer_that_answers(lab: BrokenLab) -> None:
    home = lab.home("founders", key=lab.box.root / "founder")
    joined, examined = lab.both("joiner", home, lab.invite())
    assert (joined.code, examined.code) == (ExitCode.IDENTITY_IN_USE, ExitCode.IDENTITY_IN_USE)
    assert "the peer that answers" in joined.stderr
