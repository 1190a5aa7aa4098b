from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.core.ids import PeerId
from node.pipeline.delivery import ATTEMPTS, Delivery, Pause, Suspects, Trouble

A, B, C = (PeerId(x) for x in "abc")


def test_the_planned_peer_first_then_the_others_then_a_pause():
    delivery, suspects = Delivery(1), Suspects()
    asked = []
    for _ in range(3):
        peer = delivery.choose(B, (A, B, C), suspects, 0.0)
        asked.append(peer)
        delivery.turned(peer, Trouble.BUSY)
    assert asked == [B, C, A]
    first, again = delivery.choose(B, (A, B, C), suspects, 0.0), delivery.choose(B, (A, B, C), suspects, 0.0)
    assert isinstance(first, Pause)
    assert again == B


def test_a_suspect_is_asked_last_until_it_is_heard_of():
    suspects = Suspects()
    suspects.add(A, 0.0)
    assert Delivery(0).choose(A, (A, B), suspects, 1.0) == B
    assert Delivery(0).choose(A, (A,), suspects, 1.0) == A
    suspects.clear(A)
    assert Delivery(0).choose(A, (A, B), suspects, 1.0) == A
    suspects.add(A, 0.0)
    assert Delivery(0).choose(A, (A, B), suspects, 1e9) == A


def test_a_slow_replica_is_asked_after_its_siblings_unless_the_plan_chose_it():
    suspects = Suspects()
    suspects.slow = frozenset({A, B})
    first = Delivery(0)
    asked = []
    for _ in range(3):
        peer = first.choose(A, (A, B, C), suspects, 0.0)
        asked.append(peer)
        first.turned(peer, Trouble.BUSY)
    assert asked == [A, C, B]
    suspects.add(C, 0.0)
    assert Delivery(0).choose(C, (B, C), suspects, 1.0) == B


def test_pauses_grow_to_a_bound():
    delivery, pauses = Delivery(0), []
    for _ in range(30):
        choice = delivery.choose(A, (A,), Suspects(), 0.0)
        if isinstance(choice, Pause):
            pauses.append(choice.seconds)
        elif choice:
            delivery.turned(choice, Trouble.BUSY)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.05 < pauses[-1] < 1.0


@given(st.lists(st.sampled_from([Trouble.FAILED, Trouble.REFUSED]), min_size=1), st.integers(0, 9))
def test_it_gives_up_once_everybody_refused_or_failed_often_enough(troubles, spread):
    delivery, counts = Delivery(spread), dict.fromkeys((A, B, C), 0.0)
    for i in range(100):
        choice = delivery.choose(A, (A, B, C), Suspects(), 0.0)
        if choice is None:
            assert all(n >= 1 for n in counts.values())
            return
        if isinstance(choice, Pause):
            continue
        assert counts[choice] < 1
        trouble = troubles[i % len(troubles)]
        counts[choice] += 1 if trouble is Trouble.REFUSED else 1 / ATTEMPTS
        delivery.turned(choice, trouble)
    raise AssertionError("it never gave up")
