"""Declarations of settings: each has a text and a default in its range, and a rule says the same to
whoever asks."""

from dataclasses import dataclass, fields
from typing import Any

import pytest

from node.config import KNOWN
from node.core.errors import Removed, UsageFault
from node.core.tables import Setting, build, rate_setting, setting, settings_of
from node.manifest import SECTIONS

ALL = {**KNOWN, **settings_of(SECTIONS)}


def _slow(rate: float) -> str:
    """Reason against a rate below 10 bytes a second."""
    if rate >= 10:
        return ""
    return "faster, please"


@dataclass(frozen=True)
class Oven:
    """Settings of a test."""

    heat: int = setting(180, "Degrees of the oven.", least=20, most=300)
    trays: int = setting(2, "Trays in it.", least=1)
    mode: str = setting(
        "fan", "Kind of heat.", choices=("fan", "grill"), removed={"gas": "use fan"}
    )
    label: str = setting("", "Name on the door.", pattern="[a-z]*")
    dishes: tuple[str, ...] = setting((), "Dishes in it, in their order.")
    fan: float = rate_setting("Air that the fan moves.", refused=_slow)


OVEN = settings_of({"oven": Oven})


@pytest.mark.parametrize("name", ALL)
def test_a_setting_has_a_text_and_a_default_in_its_range(name: str) -> None:
    one = ALL[name]
    assert one.text == " ".join(one.text.split())
    assert one.text
    assert "``" not in one.text, "the text is shown as it is"
    if one.default is not None:
        assert one.check(one.default) == one.default


def test_a_declaration_is_all_that_there_is_about_a_field() -> None:
    assert Oven() == Oven(180, 2, "fan", "", (), 0.0)
    assert [*OVEN] == [f"oven.{field.name}" for field in fields(Oven)]
    heat = OVEN["oven.heat"]
    assert heat == Setting("oven.heat", int, 180, "Degrees of the oven.", heat.rule)
    assert {name: one.range_sentence for name, one in OVEN.items()} == {
        "oven.heat": "a whole number, between 20 and 300",
        "oven.trays": "a whole number, 1 or more",
        "oven.mode": "text in quotes, one of fan, grill",
        "oven.label": "text in quotes, text matching [a-z]*",
        "oven.dishes": "a list of texts",
        "oven.fan": 'a number, bytes a second as a number, or such as "20Mbit", "2.5MB", "500k" '
        "(20 Mbit are 2.5 MB); 0 for no limit",
    }


@pytest.mark.parametrize(
    ("key", "given", "says", "helps"),
    [
        ("heat", 301, "oven.heat = 301", "allowed: between 20 and 300"),
        ("heat", "hot", 'oven.heat = "hot"', "expected a whole number, between 20 and 300"),
        ("trays", 0, "oven.trays = 0", "allowed: 1 or more"),
        ("mode", "steam", 'oven.mode = "steam"', "allowed: one of fan, grill"),
        ("label", "A", 'oven.label = "A"', "allowed: text matching [a-z]*"),
        ("dishes", [1], "oven.dishes = [1]", "expected a list of texts"),
        ("fan", -1, "oven.fan = -1", "allowed: bytes a second"),
        ("fan", "72 bit", "oven.fan = 9.0", "faster, please"),
        ("heta", 200, "oven.heta is not a setting", "did you mean  oven.heat  ?"),
    ],
)
def test_a_complaint_names_key_value_range_and_the_nearest_key(
    key: str, given: Any, says: str, helps: str
) -> None:
    with pytest.raises(UsageFault) as fault:
        build(Oven, {key: given}, "oven", source="in kitchen.toml")
    assert fault.value.what == f"{says}  (in kitchen.toml)"
    assert fault.value.next_step.startswith(helps)


def test_values_in_their_ranges_are_read() -> None:
    table = {"heat": 20, "mode": "grill", "label": "", "dishes": ["pie"], "fan": "80 bit"}
    assert build(Oven, table, "oven") == Oven(20, 2, "grill", "", ("pie",), 10.0)


def test_a_choice_that_was_removed_names_its_replacement() -> None:
    with pytest.raises(Removed) as fault:
        OVEN["oven.mode"].check("gas")
    assert (fault.value.what, fault.value.next_step) == (
        'oven.mode = "gas" was removed',
        "use fan",
    )


def test_a_field_without_a_declaration_is_noticed() -> None:
    @dataclass(frozen=True)
    class Bare:
        heat: int = 180

    with pytest.raises(KeyError):
        settings_of({"bare": Bare})
