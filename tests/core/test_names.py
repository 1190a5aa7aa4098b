"""Texts name a peer by its name and its short id, wherever the id was written."""

from node.core.ids import PeerId, named, short
from node.core.names import LONGEST, Names
from node.telemetry.events import Journal

OTTER = PeerId("12D3KooWaaaakJ4m2a")
FERRET = PeerId("12D3KooWbbbb9Zt9pw")


def test_a_known_peer_is_named_beside_its_short_id():
    names = Names()
    text = f"lost {short(OTTER)}, and 2:{short(FERRET)} (stage 2)"
    assert names.within(text) == text
    assert names.of(OTTER) == "kJ4m2a"
    names.learn(OTTER, "brisk-otter")
    assert names.of(OTTER) == named(OTTER, "brisk-otter") == "brisk-otter (kJ4m2a)"
    assert names.within(text) == "lost brisk-otter (kJ4m2a), and 2:9Zt9pw (stage 2)"


def test_a_name_is_not_added_twice_and_words_stay_words():
    names = Names()
    names.learn(OTTER, "brisk-otter")
    for text in (names.of(OTTER), "xkJ4m2a", f"peer {OTTER}", "stages leader kJ4m2b"):
        assert names.within(text) == text


def test_a_peer_may_change_its_name_and_cannot_write_into_the_text():
    names = Names()
    names.learn(OTTER, "brisk-otter")
    names.learn(OTTER, "")
    assert names.of(OTTER) == "brisk-otter (kJ4m2a)"
    names.learn(OTTER, "all is well: (nothing)\n\x1b[31m" + "x" * 100)
    assert names.of(OTTER) == "all is well nothing31mxxxxxx"[:LONGEST] + " (kJ4m2a)"


def test_the_journal_adds_names_to_what_others_report():
    journal = Journal()
    journal.names.learn(OTTER, "brisk-otter")
    journal.emit("training", "peer-left", f"peer {short(OTTER)} has left", peer=OTTER)
    (event,) = journal.recent()
    assert event.text == "peer brisk-otter (kJ4m2a) has left"
    assert event.fields == {"peer": OTTER}
