"""The import contracts hold, and they would notice: every one of them is broken on purpose in a
copy."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def lint(where: Path, contract: str = "") -> subprocess.CompletedProcess[str]:
    """lint-imports over the tree at ``where`` (and not the installed one)."""
    script = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import "
        "lint_imports_command as c; c()"
    )
    words = ["--no-cache", *(["--contract", contract] if contract else [])]
    env = {**os.environ, "PYTHONPATH": str(where), "PYTHONSAFEPATH": ""}
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=where,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def copy(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tree")
    shutil.copy(root / "pyproject.toml", where)
    for package in ("node", "protos"):
        shutil.copytree(
            root / package, where / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return where


PLANTED = {
    "layers": ("node/core/words.py", "import node.wire.tensors\n"),
    "layers: siblings": ("node/optim/planted.py", "import node.averaging.settings\n"),
    "layers: conductors": ("node/training/planted.py", "import node.local.split\n"),
    "layers: an unknown package": ("node/attic/__init__.py", ""),
    "acyclic": ("node/checkpoint/state.py", "\nimport node.checkpoint.fetch\n"),
    "protos": ("protos/planted.py", "import node.core.ids\n"),
    "words": ("node/core/planted.py", "from protos import tensor_pb2\n"),
    "hivemind": ("node/pipeline/planted.py", "import hivemind.p2p\n"),
    "hivemind: not all of transport": ("node/transport/planted.py", "from hivemind import P2P\n"),
    "optimizers": ("node/training/planted.py", "import pytorch_optimizer\n"),
    "plots": ("node/training/planted.py", "from matplotlib.figure import Figure\n"),
    "libp2p": ("node/control/planted.py", "import libp2p\n"),
    "no-torch": ("node/scheduler/planted.py", "import torch.nn\n"),
    "no-torch: by a detour": ("node/control/planted.py", "import node.wire.tensors\n"),
    "no-torch: plans of micro-groups": ("node/local/groups.py", "\nimport torch\n"),
    "no-torch: in settings": ("node/optim/settings.py", "\nimport torch\n"),
    "sim": ("node/sim/planted.py", "import threading\n"),
    "machines": ("node/averaging/exchange/machine.py", "\nimport asyncio\n"),
    "machines: no dice": ("node/averaging/exchange/machine.py", "\nfrom random import random\n"),
}


def test_the_contracts_hold(root: Path, copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_contract_is_tried() -> None:
    contracts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
    assert {c["id"] for c in contracts} == {name.split(":")[0] for name in PLANTED}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_seen(copy: Path, case: str) -> None:
    file, text = PLANTED[case]
    target = copy / file
    before = target.read_bytes() if target.exists() else None
    target.parent.mkdir(exist_ok=True)
    try:
        target.write_bytes((before or b"") + text.encode())
        done = lint(copy, case.split(":")[0])
    finally:
        if before is not None:
            target.write_bytes(before)
        elif target.name == "__init__.py":
            shutil.rmtree(target.parent)
        else:
            target.unlink()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "broken" in done.stdout.lower()
