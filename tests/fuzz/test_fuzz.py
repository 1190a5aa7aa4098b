"""Parsers of foreign bytes raise nothing but their typed errors, and take no more memory and work
than the bytes explain. ``python -m benchmarks.fuzzing`` does the same for minutes."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.core.errors import WireError
from testbed.fuzzing import fuzzer, parsers
from testbed.fuzzing.parsers import PARSERS, Parser, seeds_of

FEW = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=24,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", PARSERS)
def test_valid_bytes_are_parsed(name: str) -> None:
    """Most seeds are valid, so that mutations of them come deep into a parser."""
    assert seeds_of(name)
    assert not any(fuzzer.trial(name, raw)[0] for raw in seeds_of(name))


@pytest.mark.parametrize("name", PARSERS)
def test_a_seed_is_accepted(name: str) -> None:
    assert not all(fuzzer.trial(name, raw)[1] for raw in seeds_of(name))


@pytest.mark.parametrize("name", PARSERS)
@FEW
@given(seed=st.integers(0, 1 << 32))
def test_mutated_bytes_do_no_harm(name: str, seed: int) -> None:
    why, _ = fuzzer.trial(name, fuzzer.example(name, Random(seed)))
    assert not why


@FEW
@given(name=st.sampled_from(sorted(PARSERS)), raw=st.binary(max_size=200))
def test_any_bytes_do_no_harm(name: str, raw: bytes) -> None:
    why, _ = fuzzer.trial(name, raw)
    assert not why


def _raises(raw: bytes) -> None:
    raise KeyError(raw)


def _swells(raw: bytes) -> None:
    bytearray(1 << 23)


def _works(raw: bytes) -> None:
    for _ in range(100_000):
        len(raw)


@pytest.mark.parametrize(
    ("read", "why"), [(_raises, "KeyError"), (_swells, "allocated"), (_works, "calls")]
)
def test_a_broken_promise_is_noticed(
    read: Callable[[bytes], None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzer, "PARSERS", {"broken": Parser(read, (WireError,))})
    monkeypatch.setattr(fuzzer, "seeds_of", lambda name: (b"seed",))
    monkeypatch.setattr(fuzzer, "kind_of_message", lambda name: None)
    found = fuzzer.run(0.05)
    assert found.failures
    assert why in str(found.failures[0])


def test_every_message_has_a_parser() -> None:
    from node.wire.limits import SIZES

    assert SIZES.keys() == parsers.message_kinds().keys()
    assert SIZES.keys() <= PARSERS.keys()
