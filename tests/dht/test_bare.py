"""Modules of a package, imported without its __init__."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.core.bare import lay_bare


@pytest.fixture
def heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    place = tmp_path / "heavypackage"
    place.mkdir()
    (place / "__init__.py").write_text(
        "from heavypackage.big import everything\n__version__ = '1'\n"
    )
    (place / "big.py").write_text("import heavypackage.small as s\neverything = s.one + 1\n")
    (place / "small.py").write_text("import heavypackage.small as me\none = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield place.name
    for name in [n for n in sys.modules if n.split(".")[0] == place.name]:
        del sys.modules[name]


def test_the_rest_of_it_is_loaded_when_it_is_asked_for(heavy: str) -> None:
    lay_bare(heavy)
    small = importlib.import_module(f"{heavy}.small")
    assert small.one == 1
    assert f"{heavy}.big" not in sys.modules
    package = importlib.import_module(heavy)
    assert not hasattr(package, "__wrapped__")
    assert f"{heavy}.big" not in sys.modules, "looking at it is not asking for it"
    assert (package.everything, package.__version__) == (2, "1")
    assert not hasattr(package, "nothing")
    assert package.small is small


def test_a_package_whose_modules_need_its_init_is_loaded_whole(heavy: str, tmp_path: Path) -> None:
    place = tmp_path / heavy
    (place / "__init__.py").write_text(
        f"import {heavy}.registry\n{heavy}.registry.ready = True\nimport {heavy}.part\n"
    )
    (place / "registry.py").write_text("ready = False\n")
    (place / "part.py").write_text(
        f"import {heavy}.registry as r\nif not r.ready:\n    raise ImportError('not from the "
        "package')\nvalue = 3\n"
    )
    lay_bare(heavy, ["part"])
    assert importlib.import_module(heavy).part.value == 3


def test_what_is_loaded_stays_as_it_is(heavy: str) -> None:
    package = importlib.import_module(heavy)
    lay_bare(heavy)
    assert sys.modules[heavy] is package
    lay_bare("nosuchpackage")
    assert "nosuchpackage" not in sys.modules
