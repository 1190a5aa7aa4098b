"""The machine that decides which order is in force, in virtual time."""

from dataclasses import dataclass, field

from node.core.ids import PeerId
from node.orders.machine import (
    POSTERS,
    RENEW_S,
    Keep,
    Looked,
    Obey,
    OrderAction,
    OrderEvent,
    Orders,
    PostOrders,
    Tick,
    Told,
)
from node.orders.order import Order, Verb

ME = PeerId("m")
WALL = 1_800_000_000.0


def order(verb: Verb, number: int, begins: float = WALL) -> Order:
    return Order(number, verb, begins, "", f"{verb} {number}")


PAUSE = order(Verb.PAUSE, 1)
RESUME = order(Verb.RESUME, 2)


@dataclass
class Scene:
    """A machine and its clocks."""

    machine: Orders = field(default_factory=lambda: Orders(ME))
    now: float = 50.0
    wall: float = WALL

    def feed(self, event: OrderEvent, seconds: float = 0.0) -> list[OrderAction]:
        self.now += seconds
        self.wall += seconds
        return self.machine.handle(event, self.now, self.wall)


def test_a_new_order_is_kept_posted_and_obeyed_once() -> None:
    scene = Scene()
    assert scene.feed(Tick()) == []
    assert scene.feed(Told(PAUSE)) == [Keep(PAUSE, (PAUSE,)), PostOrders((PAUSE,)), Obey(PAUSE)]
    assert scene.feed(Told(PAUSE)) == []
    assert scene.machine.due_s(scene.wall) is None
    assert scene.feed(Told(RESUME)) == [
        Keep(RESUME, (RESUME,)),
        PostOrders((RESUME,)),
        Obey(RESUME),
    ]
    assert scene.feed(Told(PAUSE)) == [], "an old order cannot be replayed"
    assert scene.machine.in_force == RESUME


def test_an_order_is_in_force_from_its_own_moment_on() -> None:
    scene = Scene()
    later = order(Verb.PAUSE, 1, WALL + 20)
    assert scene.feed(Told(later)) == [Keep(later, (later,)), PostOrders((later,))]
    assert scene.machine.due_s(scene.wall) == 20
    assert scene.feed(Tick(), 19.9) == []
    assert scene.feed(Tick(), 0.2) == [Obey(later)]
    assert scene.feed(Tick(), 100) == []


def test_an_order_that_is_taken_back_in_time_is_never_obeyed() -> None:
    scene = Scene()
    scene.feed(Told(order(Verb.PAUSE, 1, WALL + 20)))
    assert Obey(RESUME) in scene.feed(Told(RESUME), 5.0)
    assert scene.feed(Tick(), 60.0) == []


def test_the_order_on_the_disk_is_obeyed_and_not_written_again() -> None:
    scene = Scene()
    assert scene.feed(Told(PAUSE, kept=True)) == [Obey(PAUSE)]
    looked = scene.feed(Looked({}), 1.0)
    assert looked == [PostOrders((PAUSE,))], "others that were away learn it from this peer"


def test_who_was_away_learns_the_newest_from_the_directory() -> None:
    scene = Scene()
    there = {PeerId("a"): [PAUSE], PeerId("b"): [RESUME]}
    done = scene.feed(Looked(there))
    kept = [Keep(PAUSE, (PAUSE,)), Keep(RESUME, (RESUME,))]
    assert done == [*kept, PostOrders((RESUME,)), Obey(RESUME)]
    assert scene.machine.known == RESUME
    assert scene.machine.in_force == RESUME
    fresh = Scene()
    done = fresh.feed(Looked({PeerId("a"): [PAUSE]}))
    assert [a for a in done if isinstance(a, Obey)] == [Obey(PAUSE)]


def test_a_few_peers_post_for_all_and_post_again_in_time() -> None:
    scene = Scene()
    scene.feed(Told(PAUSE))
    before = [PeerId(f"a{i}") for i in range(POSTERS)]
    after = [PeerId(f"z{i}") for i in range(20)]
    mine = {ME: [PAUSE]}
    behind = dict.fromkeys(after, [PAUSE])
    assert scene.feed(Looked(mine | behind), 1.0) == [], "its own posting is young"
    assert scene.feed(Looked(mine | behind), RENEW_S) == [PostOrders((PAUSE,))]
    assert scene.feed(Looked(behind), 1.0) == [PostOrders((PAUSE,))], "its own one was lost"
    enough = dict.fromkeys(before, [PAUSE])
    assert scene.feed(Looked(mine | enough), RENEW_S) == []
    behind_the_times = dict.fromkeys(before, [order(Verb.PAUSE, 0)])
    assert scene.feed(Looked(behind_the_times), RENEW_S) == [PostOrders((PAUSE,))]


def test_an_end_stays_whatever_comes_later() -> None:
    scene = Scene()
    end = order(Verb.END, 1)
    scene.feed(Told(end))
    assert scene.feed(Told(order(Verb.RESUME, 9))) == []
    assert scene.feed(Looked({PeerId("a"): [order(Verb.PAUSE, 10)]}), 1.0) == [PostOrders((end,))]
    assert scene.machine.in_force == end


def test_a_pause_holds_until_an_end_that_comes_later() -> None:
    scene = Scene()
    end = order(Verb.END, 2, WALL + 7200)
    scene.feed(Told(PAUSE))
    both = (PAUSE, end)
    assert scene.feed(Told(end)) == [Keep(end, both), PostOrders(both)]
    assert scene.machine.in_force == PAUSE
    newcomer = Scene()
    done = newcomer.feed(Looked({PeerId("a"): both}))
    assert [a for a in done if isinstance(a, Obey)] == [Obey(PAUSE)]
    restarted = Scene()
    for kept in both:
        restarted.feed(Told(kept, kept=True))
    assert restarted.machine.in_force == PAUSE
    assert restarted.machine.due_s(WALL) == 7200
    for peer in (scene, newcomer, restarted):
        assert peer.feed(Tick(), 7200.0) == [Obey(end)]
        assert peer.feed(Told(order(Verb.RESUME, 9))) == []


def test_a_run_may_go_on_until_an_end_that_comes_later() -> None:
    scene = Scene()
    end = order(Verb.END, 5, WALL + 7200)
    scene.feed(Told(PAUSE))
    scene.feed(Told(end))
    both = (RESUME, end)
    assert scene.feed(Told(RESUME), 5.0) == [Keep(RESUME, both), PostOrders(both), Obey(RESUME)]
    assert scene.feed(Told(PAUSE), 5.0) == []
    newcomer = Scene()
    newcomer.feed(Looked({PeerId("a"): (PAUSE, end), PeerId("b"): both}))
    assert newcomer.machine.held == both


def test_of_many_orders_one_of_each_kind_is_held() -> None:
    scene = Scene()
    for number in range(1, 50):
        for verb in Verb:
            scene.feed(Told(order(verb, number, WALL + 1e6)))
    assert [o.number for o in scene.machine.held] == [49, 49]


def test_who_comes_after_the_end_obeys_the_end_alone() -> None:
    end = order(Verb.END, 2)
    scene = Scene()
    done = scene.feed(Looked({PeerId("a"): (PAUSE, end)}))
    assert [a for a in done if isinstance(a, Obey)] == [Obey(end)]
