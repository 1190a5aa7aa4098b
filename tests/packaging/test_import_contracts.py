"""The import contracts hold, and they detect violations: each contract is broken on purpose in a
copy."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def lint(where: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """lint-imports over the tree at ``where`` (and not the installed one)."""
    script = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import "
        "lint_imports_command as c; c()"
    )
    words = ["--no-cache", *(f"--contract={contract}" for contract in contracts)]
    env = {**os.environ, "PYTHONPATH": str(where), "PYTHONSAFEPATH": "", "COLUMNS": "200"}
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
    for package in ("node", "protos", "testbed", "benchmarks"):
        shutil.copytree(
            root / package, where / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return where


PLANTED = {
    "layers": ("node/core/words.py", "import node.wire.tensors\n"),
    "layers: siblings": ("node/optim/planted.py", "import node.averaging.settings\n"),
    "layers: conductors": ("node/coordinator/planted.py", "import node.local.split\n"),
    "layers: an unknown package": ("node/attic/__init__.py", ""),
    "acyclic": ("node/checkpoint/state.py", "\nimport node.checkpoint.fetch\n"),
    "testbed": ("testbed/fakes/planted.py", "import benchmarks.report\n"),
    "testbed: no test": ("testbed/fakes/planted.py", "import tests.conftest\n"),
    "testbed-layers": ("testbed/reference/planted.py", "import testbed.daemons.fleet\n"),
    "product": ("node/sim/planted.py", "import testbed.fakes.clock\n"),
    "product: no benchmark": ("node/tools/planted.py", "import benchmarks.report\n"),
    "benchmarks": ("benchmarks/shared/planted.py", "import tests.conftest\n"),
    "protos": ("protos/planted.py", "import node.core.ids\n"),
    "words": ("node/core/planted.py", "from protos import tensor_pb2\n"),
    "hivemind": ("node/pipeline/planted.py", "import hivemind.p2p\n"),
    "hivemind: not all of transport": ("node/transport/planted.py", "from hivemind import P2P\n"),
    "optimizers": ("node/stage/planted.py", "import pytorch_optimizer\n"),
    "tensorboard": ("node/app/planted.py", "import tensorboard\n"),
    "plots": ("node/stage/planted.py", "from matplotlib.figure import Figure\n"),
    "libp2p": ("node/control/planted.py", "import libp2p\n"),
    "click": ("node/control/planted.py", "import click\n"),
    "no-torch": ("node/scheduler/planted.py", "import torch.nn\n"),
    "no-torch: by a detour": ("node/control/planted.py", "import node.wire.tensors\n"),
    "no-torch: plans of micro-groups": ("node/local/groups.py", "\nimport torch\n"),
    "no-torch: in settings": ("node/optim/settings.py", "\nimport torch\n"),
    "sim": ("node/sim/planted.py", "import threading\n"),
    "agreement": ("node/consensus/planted.py", "from node.pipeline.events import MicroBatchDone\n"),
    "votes": ("node/epoch/leader/planted.py", "from node.consensus.votes import Certificate\n"),
    "machines: all of the epoch": ("node/epoch/planted.py", "import time\n"),
    "machines: all of consensus": ("node/consensus/planted_too.py", "import asyncio\n"),
    "machines": ("node/averaging/exchange/machine.py", "\nimport asyncio\n"),
    "machines: no dice": ("node/averaging/exchange/machine.py", "\nfrom random import random\n"),
}


def test_the_tree_keeps_every_import_contract(root: Path, copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_contract_is_tried() -> None:
    contracts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
    assert {c["id"] for c in contracts} == {name.split(":")[0] for name in PLANTED}


@pytest.mark.parametrize("turn", range(4))
def test_a_planted_violation_is_seen(root: Path, copy: Path, turn: int) -> None:
    """One violation of each contract in one run, because every run reads all of the tree."""
    of = {name: name.split(":")[0] for name in PLANTED}
    planted = {c: [name for name in PLANTED if of[name] == c] for c in of.values()}
    cases = {c: names[turn] for c, names in planted.items() if turn < len(names)}
    files = {PLANTED[name][0] for name in cases.values()}
    for file, text in (PLANTED[name] for name in cases.values()):
        (copy / file).parent.mkdir(exist_ok=True)
        with (copy / file).open("a") as target:
            target.write(text)
    done = lint(copy, *cases)
    for file in files:
        (copy / file).unlink()
        if (root / file).exists():
            shutil.copy(root / file, copy / file)
        elif file.endswith("__init__.py"):
            shutil.rmtree((copy / file).parent)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"Contracts: 0 kept, {len(cases)} broken." in done.stdout, done.stdout
    for file in files:
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package, _, part = module.rpartition(".")
        named = module in done.stdout or (package in done.stdout and f".{part} " in done.stdout)
        assert named, f"{module} is not named in\n{done.stdout}"
