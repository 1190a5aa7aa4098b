"""A stranger who misbehaves all day gets ten lines a minute and one that counts the rest."""

from node.core.ids import PeerId
from node.telemetry import events
from node.telemetry.events import LINES, WINDOW_S, Journal, RateLimitedLog
from testbed.fakes.clock import VirtualClock

NOISY = PeerId("12D3KooWNoisy")
QUIET = PeerId("12D3KooWQuiet")


def made() -> tuple[RateLimitedLog, Journal, VirtualClock]:
    journal = Journal()
    clock = VirtualClock()
    return RateLimitedLog(journal, clock.now), journal, clock


def test_only_repeated_lines_about_the_same_peer_are_limited() -> None:
    quiet, journal, clock = made()
    for i in range(100):
        quiet.emit(NOISY, "dht", "rate-limited" if i % 2 else "fault", f"line {i}", "warning", n=i)
    quiet.emit(QUIET, "dht", "fault", "one line")
    about = [e.fields["peer"] for e in journal.recent()]
    assert (about.count(NOISY), about.count(QUIET)) == (LINES, 1)
    assert journal.recent()[0].fields == {"peer": NOISY, "n": 0}
    clock.advance(WINDOW_S)
    quiet.emit(QUIET, "dht", "fault", "another")
    (summary,) = [e for e in journal.recent() if e.kind == "kept-back"]
    assert summary.fields == {"peer": NOISY, "lines": 90}
    assert "45 fault, 45 rate-limited" in summary.text
    quiet.emit(NOISY, "dht", "fault", "a new minute")
    assert journal.recent()[-1].text == "a new minute"


def test_suppressed_lines_are_reported_once_at_the_end() -> None:
    quiet, journal, _ = made()
    for _ in range(LINES + 3):
        quiet.emit(NOISY, "transport", "fault", "x")
    quiet.close()
    quiet.close()
    assert [e.fields["lines"] for e in journal.recent() if e.kind == "kept-back"] == [3]


def test_many_peers_take_a_bounded_memory(monkeypatch) -> None:
    monkeypatch.setattr(events, "PEERS_KEPT", 3)
    quiet, journal, _ = made()
    for i in range(10):
        for _ in range(LINES + 1):
            quiet.emit(PeerId(f"peer{i}"), "transport", "fault", "x")
    assert len(quiet._windows) == 3
    assert len([e for e in journal.recent() if e.kind == "kept-back"]) == 7
