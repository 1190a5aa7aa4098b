"""Removed settings and verbs: each is refused by name wherever it is written, with its
successor."""

import json
from pathlib import Path

import pytest

from node.app.change import DOMAIN, read, wanted
from node.averaging.strategies.outer import REMOVED, STRATEGIES
from node.core.errors import ExitCode, Refused, Removed
from node.identity.keys import Identity
from node.identity.signed_text import sign_text
from node.manifest import Manifest, amended

CELLS = "[averaging]\ncell = 1\n[outer]\nwindow_s = 20.0\n"


@pytest.fixture
def owner(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "owner.key")


@pytest.fixture
def manifest(owner: Identity) -> Manifest:
    return Manifest.parse(Manifest.parse(CELLS.encode()).sign(owner))


def test_what_is_advised_instead_is_there() -> None:
    for name, instead in REMOVED.items():
        assert name not in STRATEGIES
        named = [word.strip(',"') for word in instead.split() if word.startswith('"')]
        assert named
        assert set(named) <= STRATEGIES.keys()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", REMOVED)
def test_a_manifest_of_a_removed_strategy_is_refused(name: str, number: int) -> None:
    text = f'format = {number}\n{CELLS}strategy = "{name}"\n'
    with pytest.raises(Removed) as refusal:
        Manifest.parse(text.encode())
    assert refusal.value.what == f'outer.strategy = "{name}" was removed'
    assert refusal.value.next_step == REMOVED[name]
    assert refusal.value.code is ExitCode.USAGE
    with pytest.raises(Removed, match="was removed"):
        amended(Manifest.parse(CELLS.encode()), {"outer.strategy": name})


def test_the_fanout_of_push_sum_is_read_over_only_in_old_files_that_do_not_use_it() -> None:
    plain = Manifest.parse(CELLS.encode())
    assert Manifest.parse(f"{CELLS}fanout = 1\n".encode()) == plain
    for text in (f"{CELLS}fanout = 2\n", f"format = 2\n{CELLS}fanout = 1\n"):
        with pytest.raises(Removed, match=r"outer\.fanout is not a setting any more") as refusal:
            Manifest.parse(text.encode())
        assert REMOVED["push-sum"] in refusal.value.next_step


@pytest.mark.parametrize("name", REMOVED)
def test_a_change_to_a_removed_strategy_cannot_be_asked_for(manifest: Manifest, name: str) -> None:
    with pytest.raises(Removed, match="was removed"):
        wanted(manifest, f'{CELLS}strategy = "{name}"\n'.encode())


@pytest.mark.parametrize("outer", [{"strategy": name} for name in REMOVED] + [{"fanout": 2}])
def test_a_change_to_what_was_removed_is_not_followed(
    manifest: Manifest, owner: Identity, outer: dict[str, object]
) -> None:
    """Signed by an older tutti, which has it."""
    said = {"run": manifest.run_id, "revision": 1, "cell": 1, "outer": {"window_s": 20.0, **outer}}
    body = json.dumps(said)
    text = sign_text(owner, body, DOMAIN)
    with pytest.raises(Refused, match="the owner's change cannot be followed") as refusal:
        read(manifest, text)
    assert isinstance(refusal.value.__cause__, Removed)
    assert REMOVED["push-sum"] in refusal.value.next_step
    assert "tutti swarm switch FILE" in refusal.value.next_step
