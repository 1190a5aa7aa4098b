import pytest

from node.control.naming import called, resolve
from node.core.errors import UsageFault
from node.identity.keys import Identity

ANNA, BERT, TWIN, STRANGER = (Identity.ephemeral().peer_id for _ in range(4))
KNOWN = {ANNA: "anna", BERT: "bert", TWIN: "bert"}


# Ids without the random keys: every process of a parallel run has to collect the same tests.
@pytest.mark.parametrize(
    "text",
    ["anna", ANNA, ANNA[-6:], ANNA[-4:]],
    ids=["name", "PeerId", "six letters", "four letters"],
)
def test_a_peer_is_meant_by_name_by_last_letters_and_by_all_of_them(text):
    assert resolve(text, KNOWN) == ANNA


def test_a_whole_peer_id_may_be_of_a_stranger():
    assert resolve(STRANGER, KNOWN) == STRANGER
    assert (called(STRANGER, KNOWN), called(ANNA, KNOWN)) == (STRANGER, f"anna ({ANNA})")


def test_a_name_of_two_is_refused_with_both():
    with pytest.raises(UsageFault, match="2 peers are called 'bert'") as fault:
        resolve("bert", KNOWN)
    assert BERT in fault.value.next_step
    assert TWIN in fault.value.next_step


def test_a_name_comes_before_last_letters():
    """Otherwise a peer could choose its key so that it stands for another's name."""
    assert resolve(BERT[-6:], KNOWN | {ANNA: BERT[-6:]}) == ANNA


@pytest.mark.parametrize(
    "text",
    ["", "nobody", ANNA[-3:], ANNA[:-1], "\x1b[2J"],
    ids=["nothing", "no name", "three letters", "cut PeerId", "escape"],
)
def test_what_names_nobody_is_refused(text):
    with pytest.raises(UsageFault, match="no peer in sight") as fault:
        resolve(text, KNOWN)
    assert "\x1b" not in fault.value.what
    assert "tutti peers" in fault.value.next_step
