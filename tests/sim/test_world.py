"""Virtual time, lines, calls, the noticeboard and the disk of the simulated swarm."""

from __future__ import annotations

import random

from node.core.ids import PeerId
from node.core.journey import Version
from node.dht.settings import DirectorySettings
from node.sim.device import Device, Priority
from node.sim.directory import Body, FakeDirectory
from node.sim.disk import Checkpoint, Disk
from node.sim.links import Links, Wall
from node.sim.values import Value, digest_of, first_values, fresh_value
from node.sim.world import SILENT_S, Host, World

A, B = PeerId("a"), PeerId("b")


def pair(**changes: float) -> tuple[World, Host, Host]:
    line = {"latency": 0.1, "jitter": 0.0, "bandwidth": 0.0, "loss": 0.0} | changes
    world = World(0, Links(random.Random(0), **line))
    for name in (A, B):
        world.hosts[name] = Host(world, name)
    return world, world.hosts[A], world.hosts[B]


def ask(
    host: Host, timeout: float = 30.0, answers: bool = True, bulk: int = 0
) -> list[tuple[str, float]]:
    said: list[tuple[str, float]] = []
    now = lambda: round(host.world.now, 3)  # noqa: E731

    def serve(there: Host, call) -> None:
        said.append(("served", now()))
        call.gone = lambda: said.append(("gone", now()))
        if answers:
            call.say("yes")

    host.call(
        B,
        100,
        serve,
        lambda m: said.append((m, now())),
        lambda why: said.append((why, now())),
        timeout,
        bulk=bulk,
    )
    return said


def test_a_call_takes_the_way_there_and_back() -> None:
    world, a, _ = pair()
    said = ask(a)
    world.run(1.0)
    assert said == [("served", 0.1), ("yes", 0.2)]


def test_transfers_on_a_line_queue() -> None:
    links = Links(random.Random(0), 0.1, 0.0, 8000.0, 0.0)
    assert round(links.travel(A, B, 1000, 0.0), 3) == 1.1
    assert round(links.travel(A, B, 1000, 0.0), 3) == 2.1
    assert round(links.travel(B, A, 1000, 0.0), 3) == 1.1, "the other direction is its own"
    assert round(links.travel(A, B, 0, 0.0), 3) == 0.1


def test_a_lost_message_comes_later() -> None:
    links = Links(random.Random(0), 0.1, 0.0, 0.0, 1.0)
    assert links.travel(A, B, 0, 0.0) > 0.3


def test_a_call_to_the_dead_is_refused_and_one_under_way_is_reset() -> None:
    world, a, b = pair()
    said = ask(a, answers=False)
    world.run(0.5)
    world.kill(b)
    late = ask(a)
    world.run(2.0)
    assert said == [("served", 0.1), ("connection reset", 0.6)]
    assert late == [("connection refused", 0.7)]


def test_a_call_through_a_wall_fails_in_time_and_arrives_when_it_falls() -> None:
    world, a, _ = pair()
    wall = Wall(frozenset({A}), frozenset({B}))
    world.links.walls.append(wall)
    short, patient = ask(a, timeout=SILENT_S / 8), ask(a, timeout=60.0)
    world.run(SILENT_S / 4)
    assert [what for what, _ in short] == ["no answer in time"]
    world.links.walls.remove(wall)
    world.run(SILENT_S / 4 + 4.0)
    assert [what for what, _ in patient] == ["served", "yes"]
    world.links.walls.append(wall)
    begin, dead = world.now, ask(a, timeout=60.0)
    world.run(60.0)
    assert dead == [("the connection is silent", begin + SILENT_S)]


def test_a_wall_in_one_direction_lets_the_question_through_and_no_answer() -> None:
    world, a, _ = pair()
    world.links.walls.append(Wall(frozenset({B}), frozenset()))
    said = ask(a, timeout=3.0)
    world.run(4.0)
    assert said[:2] == [("served", 0.1), ("no answer in time", 3.0)]


def test_who_stands_still_hears_everything_when_it_goes_on() -> None:
    world, a, b = pair()
    beats: list[float] = []
    b.after(0.5, lambda: beats.append(world.now))
    world.pause(b)
    said, gone = ask(a), ask(a, timeout=0.3)
    world.run(0.9)
    assert beats == []
    assert gone == [("no answer in time", 0.3)]
    world.resume(b)
    world.run(2.0)
    assert beats == [0.9]
    assert said == [("served", 0.9), ("yes", 1.0)]
    assert ("yes", 1.0) not in gone
    world.pause(b)
    begin, silent = world.now, ask(a, timeout=60.0)
    world.run(60.0)
    assert silent == [("the connection is silent", round(begin + 0.1 + SILENT_S, 3))]


def test_the_side_that_serves_hears_that_the_caller_hung_up() -> None:
    world, a, _ = pair()
    said = ask(a, timeout=1.0, answers=False)
    world.run(3.0)
    assert said == [("served", 0.1), ("no answer in time", 1.0), ("gone", 1.1)]


def test_nothing_of_a_former_life_happens_in_the_next() -> None:
    world, a, _ = pair()
    done: list[int] = []
    a.after(1.0, done.append, 1)
    world.kill(a)
    a.life, a.alive = a.life + 1, True
    a.after(2.0, done.append, 2)
    world.run(5.0)
    assert done == [2]


def test_a_device_does_backward_first_and_one_job_at_a_time() -> None:
    world, a, _ = pair()
    device, done = Device(a, 2.0), list[tuple[str, float]]()
    for name, priority in (
        ("first", Priority.FORWARD),
        ("forward", Priority.FORWARD),
        ("backward", Priority.BACKWARD),
    ):
        device.run(priority, 1.0, lambda n=name: done.append((n, world.now)))
    world.run(10.0)
    assert done == [("first", 2.0), ("backward", 4.0), ("forward", 6.0)]
    assert device.busy_s == 6.0


def test_a_record_spreads_expires_and_does_not_pass_walls() -> None:
    links = Links(random.Random(0), 0.1, 0.0, 0.0, 0.0)
    board = FakeDirectory(links, DirectorySettings(), 0.5)
    body = Body(0, "training", 3)
    board.post(A, body, 0.0, 0.0)
    seen = lambda now, wall: [r.seq for r in board.read(B, 0, now, wall)]  # noqa: E731
    assert seen(0.4, 0.4) == []
    assert seen(0.5, 0.5) == [1]
    assert seen(0.5, 25.0) == [], "a clock far ahead takes it for expired"
    assert seen(0.5, -700.0) == [], "a clock far behind does not believe that it lives so long"
    board.post(A, body, 5.0, 5.0)
    assert seen(5.2, 5.2) == [1], "the older record stands until the newer has spread"
    assert seen(5.6, 5.6) == [2]
    links.walls.append(Wall(frozenset({A}), frozenset({B})))
    board.post(A, body, 10.0, 10.0)
    assert seen(11.0, 11.0) == [2], "the newest never came here"
    assert seen(26.0, 26.0) == []
    links.walls.clear()
    board.post(A, body, 27.0, 27.0)
    assert seen(28.0, 28.0) == [4]
    board.withdraw(A, 29.0, 29.0)
    assert seen(30.0, 30.0) == []


def test_a_checkpoint_is_found_when_it_is_whole_and_not_before() -> None:
    world, a, _ = pair()
    disk, values = Disk(2, 1.0), first_values(["p", "q", "r"])
    done: list[float] = []

    def save(epoch: int) -> bool:
        blank = Checkpoint(Version(epoch), 1, 3, 0, (0, ()), {})
        return disk.save(a, blank, values, {}, lambda: done.append(world.now))

    assert save(1)
    assert not save(2), "one at a time"
    world.run(0.6)
    assert disk.versions(1) == ()
    world.kill(a)
    world.run(5.0)
    assert disk.versions(1) == (), "what a crash leaves is not found"
    a.life, a.alive = a.life + 1, True
    disk.boot()
    for epoch in (3, 4, 5):
        assert save(epoch)
        world.run(world.now + 2.0)
    assert disk.versions(1) == (Version(4), Version(5)), "the newest two stay"
    assert save(6)
    world.run(world.now + 0.3)
    disk.boot()
    world.run(world.now + 2.0)
    assert disk.versions(1) == (Version(4), Version(5)), "what was abandoned is never finished"
    found = disk.find(1, Version(5))
    assert found is not None
    assert found.whole
    assert disk.find(1, Version(5, "a" * 32)) is None


def test_equal_values_come_only_from_the_same_step() -> None:
    old, makes = first_values(["p"])["p"], Version(1, "a" * 32)
    from node.sim.values import Share, next_moment

    shares = (Share(A, (1, 2), 32), Share(B, (3,), 16))
    fresh = fresh_value("p", old, shares, None, makes)
    assert fresh == fresh_value("p", old, shares, None, makes)
    moment = next_moment("p", None, fresh, makes)
    others = {
        fresh_value("p", old, shares[:1], None, makes),
        fresh_value("p", old, shares, moment, makes),
        fresh_value("p", fresh, shares, None, makes),
        fresh_value("p", old, shares[::-1], None, makes),
    }
    assert fresh not in others
    assert len(others) == 4
    assert digest_of({"p": fresh}) != digest_of({"p": Value(old.mark, makes)})
    assert moment.steps == 1
