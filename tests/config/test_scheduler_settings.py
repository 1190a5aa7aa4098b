"""How paths are laid, as a manifest says it: what cannot be, or cannot hold together, is refused
with the next step."""

import pytest

from node.core.errors import UsageFault
from node.manifest import Manifest

FOUR = (
    "[model]\nlayers = 4\n[pipeline]\nstages = 4\nmicro_batch = 4\nmay_skip = "
    "0.5\n[training]\ntarget_batch = 32\n"
)
FEW = FOUR.replace("target_batch = 32", "target_batch = 4")


def manifest(scheduler: str, rest: str = "", base: str = FOUR) -> Manifest:
    return Manifest.parse(f"{base}{rest}[scheduler]\n{scheduler}\n".encode())


@pytest.mark.parametrize(
    ("lines", "base", "says"),
    [
        ('paths = "shortest"', FOUR, "planned"),
        ("paths = 1", FOUR, "scheduler.paths"),
        ("skip = -0.1", FOUR, "scheduler.skip"),
        ("skip = 1.0", FOUR, "scheduler.skip"),
        ("skip = nan", FOUR, "scheduler.skip"),
        ('skip = "half"', FOUR, "scheduler.skip"),
        ("max_swaps = -1", FOUR, "scheduler.max_swaps"),
        ("max_swaps = 4097", FOUR, "scheduler.max_swaps"),
        ("max_swaps = 1.5", FOUR, "scheduler.max_swaps"),
        ("max_jump = -1", FOUR, "scheduler.max_jump"),
        ("max_jump = true", FOUR, "scheduler.max_jump"),
        ("keep_first = -1", FOUR, "scheduler.keep_first"),
        ("swaps = 2", FOUR, "max_swaps"),
        ("skip = 0.2", FOUR, "0.25 and more to leave out one"),
        ("skip = 0.75", FOUR, "pipeline.may_skip = 0.5"),
        ("skip = 0.5\nmax_jump = 1", FOUR, "max_jump 2"),
        ("skip = 0.5\nkeep_first = 2", FOUR, "at most 1"),
        ("skip = 0.5", FEW, "do not visit every stage"),
    ],
)
def test_what_cannot_be_or_not_together_is_refused(lines: str, base: str, says: str) -> None:
    with pytest.raises(UsageFault) as refusal:
        manifest(lines, base=base)
    assert refusal.value.next_step
    assert says in f"{refusal.value}; {refusal.value.next_step}"


def test_what_holds_is_taken_and_comes_back() -> None:
    made = manifest('paths = "round-robin"\nskip = 0.5\nmax_swaps = 2\nmax_jump = 3')
    s = made.scheduler
    assert (s.paths, s.skip, s.max_swaps, s.max_jump, s.hops(4)) == ("round-robin", 0.5, 2, 3, 2)
    assert Manifest.parse(made.to_toml()) == made
    assert made.run_id != manifest("skip = 0.25").run_id
    # Cells and paths that leave out stages go together.
    manifest("skip = 0.5", "[averaging]\ncell = 2\n[outer]\nwindow_s = 20.0\n")
