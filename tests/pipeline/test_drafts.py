"""Drafts of the next tokens from the text itself, and passes that check them."""

import random
from dataclasses import replace

import pytest

from node.core.ids import PeerId
from node.inference.drafts import ALIKE, FIRST, MOST, Drafts
from node.inference.text_session import MOST_STALE
from node.pipeline.texts import TextKey, TextTable
from tests.pipeline.test_texts import LONG, PROMPT, Writer, watch_lengths, writing

pytestmark = pytest.mark.usefixtures("unhurried")
STEADY = [1, 2, 3, 4, 5, 6, 7, 8]


class Given(Drafts):
    """Drafts that a test chooses."""

    def __init__(self, *drafts: list[int]) -> None:
        super().__init__()
        self.given = list(drafts)
        self.judged: list[tuple[int, int]] = []

    def next(self, ids, room):
        if not self.given:
            return []
        return self.given.pop(0)[: max(0, room)]

    def judge(self, drafted, right):
        self.judged.append((drafted, right))


def test_a_text_goes_on_as_it_did_before():
    drafts = Drafts()
    assert drafts.next([9, *STEADY, 30, 1, 2, 3], 8) == [4, 5]
    assert drafts.next([9, *STEADY, 30, 1, 2, 3], 1) == [4]
    assert drafts.next([9, *STEADY, 30, 1, 2, 3], 0) == []
    assert Drafts().next(STEADY, 8) == []
    assert Drafts().next(STEADY[:2], 8) == []
    assert Drafts().next([], 8) == []


def test_the_newest_place_counts():
    assert Drafts().next([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3], 8) == [5, 6]


def test_a_text_that_repeats_itself_goes_on_into_its_own_draft():
    drafts = Drafts()
    drafts.judge(4, 4)
    assert drafts.next([7, 8] * 10, 8) == [7, 8] * 4
    assert drafts.next([7, 8] * 10 + [7], 3) == [8, 7, 8]


def test_drafts_grow_while_they_are_right_and_shrink_when_they_are_wrong():
    drafts = Drafts()
    text = STEADY * 5

    def length() -> int:
        return len(drafts.next(text, 100))

    assert length() == FIRST
    for wanted in (2 * FIRST, MOST, MOST):
        drafts.judge(length(), length())
        assert length() == wanted
    drafts.judge(MOST, 1)
    assert length() == MOST
    for wanted in (MOST // 2, MOST // 4, 1, 1):
        drafts.judge(length(), 0)
        assert length() == wanted


def test_a_draft_is_no_longer_than_the_tokens_that_stood_before():
    drafts = Drafts()
    for _ in range(3):
        drafts.judge(MOST, MOST)
    text = [*range(100, 120), 1, 2, 3, *range(4, 30), 1, 2, 3]
    assert drafts.next(text, 100) == [4, 5, 6]


def test_drafts_are_found_as_a_look_through_the_whole_text_finds_them():
    dice = random.Random(3)
    for _ in range(50):
        text = [dice.randrange(3) for _ in range(40)]
        drafts = Drafts()
        for end in range(1, len(text)):
            ids = text[:end]
            places = [
                at for at in range(ALIKE, end) if ids[at - ALIKE : at] == ids[-ALIKE:] and at < end
            ]
            found = drafts.next(ids, 1)
            assert found == ([ids[places[-1]]] if places and end >= ALIKE else [])


async def test_right_drafts_save_passes(make_swarm):
    writer = await writing(make_swarm)
    wanted = writer.alone(8)
    right = wanted[len(PROMPT) :]
    drafts = writer.session.drafts = Given(right[:3], right[4:6])
    seen = watch_lengths(writer)
    assert await writer.write(8) == wanted
    # The prompt with three drafted tokens, a token with two, and one that is left.
    assert seen == [8, 3 + 3, 1 + 2, 1]
    assert drafts.judged == [(3, 3), (2, 2)]
    assert writer.session.begun == 1


@pytest.mark.parametrize("wrong_from", [0, 1, 2])
async def test_wrong_drafts_change_nothing(make_swarm, wrong_from):
    writer = await writing(make_swarm)
    wanted = writer.alone(8)
    right = wanted[len(PROMPT) :]
    draft = [*right[:wrong_from], *((token + 1) % 30 for token in right[wrong_from:3])]
    drafts = writer.session.drafts = Given(draft)
    seen = watch_lengths(writer)
    assert await writer.write(8) == wanted
    assert drafts.judged == [(3, wrong_from)]
    assert seen == [8, 3 + 3] + [1] * (7 - wrong_from)
    assert writer.session.begun == 1, "the caches were cut, not computed again"
    lengths = {
        text.cache.length
        for stage in ("s1a", "s2a", "s3a")
        for text in writer.swarm.pipelines[stage].texts._texts.values()
    }
    assert lengths == {len(wanted) - 1}


async def test_drafts_end_at_the_longest_text_that_the_model_sees(make_swarm):
    writer = await writing(make_swarm, model=replace(LONG, positions=16))
    wanted = writer.alone(5)
    right = wanted[len(PROMPT) :]
    writer.session.drafts = Given(right[:3], right[4:] + [1, 1, 1])
    seen = watch_lengths(writer)
    assert await writer.write(5) == wanted
    assert seen == [8, 3 + 3, 1 + 1]


async def test_the_likeliest_text_is_the_same_with_drafts_and_without(make_swarm):
    writer = await writing(make_swarm)
    wanted = writer.alone(40)
    seen = watch_lengths(writer)
    assert await writer.write(40) == wanted
    assert len(seen) < 40, "this text repeats itself"


def older_last(writer: Writer) -> None:
    """The last stage knows no drafts: it answers with one position."""
    old = writer.swarm.pipelines["s3a"].forward_requests
    real = old.receive

    async def receive(way, caller, incoming, context):
        incoming.head.text.ClearField("positions")
        await real(way, caller, incoming, context)

    old.receive = receive


def older_middle(writer: Writer) -> None:
    """A stage in the middle gives up a text of which it has more tokens than it is told."""
    table = writer.swarm.pipelines["s2a"].texts
    real = table.take

    def take(key, past, count, now, *, guest=False):
        text = table._texts.get(key)
        if text is not None and text.cache.length != past:
            table.drop(key)
            return None
        return real(key, past, count, now, guest=guest)

    table.take = take


@pytest.mark.parametrize("older", [older_last, older_middle])
async def test_a_hop_with_older_software_gets_no_drafts(make_swarm, older):
    writer = await writing(make_swarm)
    wanted = writer.alone(5)
    wrong = (wanted[len(PROMPT)] + 1) % 30
    writer.session.drafts = Given([wrong], [wrong], [wrong])
    older(writer)
    assert await writer.write(5) == wanted
    assert writer.session.drafts is None
    assert writer.session.begun == 2


async def test_a_lost_peer_does_not_end_the_drafts_of_a_text(make_swarm):
    """Nothing of a new cache was cut, so no failure of it tells of older software."""
    versions = [3]
    writer = await writing(make_swarm, replicas=2)
    writer.session._version = lambda: versions[-1]
    wanted = writer.alone(5)
    wrong = (wanted[len(PROMPT)] + 1) % 30
    writer.session.drafts = Given([wrong])
    await writer.write(1)
    versions.append(3 + MOST_STALE)
    [lost] = [hop.peer for hop in writer.session._kept.hops if hop.stage == 2]
    await writer.swarm.kill(str(lost))
    assert await writer.write(4) == wanted
    assert writer.session.drafts is not None


async def test_a_stage_without_memory_for_texts_judges_drafts_all_the_same(make_swarm):
    writer = await writing(make_swarm)
    writer.swarm.pipelines["s2a"].texts.limit = 1
    writer.ids = PROMPT[:3]
    wanted = writer.alone(3)
    writer.session.drafts = Given([1, 2])
    assert await writer.write(3) == wanted
    assert writer.session.drafts is not None


def test_the_memory_of_a_text_that_is_cut_stays_set_aside():
    held = TextTable(1000, lambda tokens: 10 * tokens)
    key = TextKey(PeerId("a"), 1, PeerId("a"))
    cache = held.take(key, 0, 50, 0.0)
    assert cache is not None
    cache.advance(50)
    held.done(key, cache, 0.0)
    assert held.take(key, 51, 1, 1.0) is None, "it has no 51 tokens"
    cache = held.take(key, 0, 50, 1.0)
    assert cache is not None
    cache.advance(50)
    held.done(key, cache, 1.0)
    assert held.take(key, 40, 1, 2.0) is cache
    assert held.used == 500
