"""Choice of devices, number of threads, and refusals of impossible settings: no process is started
here."""

import ast
from pathlib import Path

import pytest

import cli
from node.app.assembly import _devices
from node.config import NodeConfig
from node.core.errors import OutOfResources, UsageFault
from node.local.groups import Sharded
from node.local.split import check_devices, cut_of, span
from node.local.stage import device_names, threads_each
from node.manifest import Manifest, amended
from node.model.settings import ModelSettings
from node.model.shapes import all_shapes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("model", "devices", "says", "able"),
    [
        (ModelSettings(), 3, "heads (4), key/value heads (2)", "set local_devices to 1 or 2"),
        (
            ModelSettings(heads=8, kv_heads=8, d_ff=384),
            16,
            "heads (8), key/value heads (8)",
            "1, 2, 4 or 8",
        ),
        (ModelSettings(d_ff=381), 2, "inner width (381)", "set local_devices to 1"),
        (ModelSettings(), 65, "65 local devices", "1 to 64"),
        (ModelSettings(), 0, "0 local devices", "1 to 64"),
    ],
)
def test_an_indivisible_device_count_names_those_possible(model, devices, says, able):
    with pytest.raises(UsageFault) as fault:
        check_devices(model, devices)
    assert says in fault.value.what
    assert able in fault.value.next_step


@pytest.mark.parametrize("change", [{"qk_norm": True}, {"qkv_bias": True}])
def test_every_parameter_is_cut_without_a_gap(change):
    model = ModelSettings(layers=1, **change)
    check_devices(model, 2)
    for name, shape in all_shapes(model).items():
        dim = cut_of(name)
        if dim is None:
            assert len(shape) == 1, "matrices are cut"
        else:
            cut = Sharded.as_parameter(name, shape, 2)
            assert (cut.dim, sum(cut.sizes)) == (dim, shape[dim])
    for size in (1, 5, 8, 61):
        cuts = [span(size, r, 4) for r in range(4)]
        assert [a for a, _ in cuts] == [0, *(b for _, b in cuts[:-1])]
        assert cuts[-1][1] == size


@pytest.fixture(params=[0])
def gpus(monkeypatch, request) -> None:
    """A machine with this number of GPUs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: request.param > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: request.param)


@pytest.mark.parametrize(
    ("gpus", "name", "count", "found"),
    [
        (0, "cpu", 3, ["cpu"] * 3),
        (0, "auto", 2, ["cpu", "cpu"]),
        (4, "auto", 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, "cuda:2", 2, ["cuda:2", "cuda:3"]),
    ],
    indirect=["gpus"],
)
def test_devices_are_named_by_kind_and_number(gpus, name, count, found):
    assert device_names(name, count) == found


@pytest.mark.parametrize(
    ("gpus", "name", "count", "fault", "says"),
    [
        (0, "cuda", 2, OutOfResources, "cuda:1"),
        (4, "cuda:2", 3, OutOfResources, "cuda:4"),
        (4, "tpu", 2, UsageFault, "tpu"),
    ],
    indirect=["gpus"],
)
def test_devices_that_are_not_here_are_refused(gpus, name, count, fault, says):
    with pytest.raises(fault, match=says):
        device_names(name, count)


@pytest.mark.parametrize(("given", "devices", "each"), [(0, 4, 2), (0, 16, 1), (3, 4, 3)])
def test_threads_are_shared_between_the_devices(monkeypatch, given, devices, each):
    monkeypatch.setattr("node.local.stage.cores", lambda: 8)
    assert threads_each(given, ["cpu"] * devices) == each


@pytest.mark.parametrize(
    ("change", "says"),
    [({"model.adapter": 2}, "adapters"), ({"optimizer.parameters": "bf16"}, "bf16")],
)
def test_what_several_devices_cannot_do_is_refused_at_start(tmp_path, change, says):
    config = NodeConfig.load({"local_devices": 2}, {"TUTTI_HOME": str(tmp_path)})
    with pytest.raises(UsageFault, match=f"local devices in a run .*{says}") as fault:
        _devices(config, amended(Manifest.default_demo(), change))
    assert "--local-devices 1" in fault.value.next_step


@pytest.mark.parametrize("value", ["0", "65", "two"])
def test_a_wrong_number_on_the_command_line_is_a_usage_error(tmp_path, capsys, value):
    assert cli.main(["--home", str(tmp_path), "start", "--local-devices", value]) == 2
    assert "local" in capsys.readouterr().err


def test_one_device_imports_nothing_of_this_package():
    """Outside the package only assembly imports it, and only inside functions."""
    for file in (f for f in (ROOT / "node").rglob("*.py") if f.parent.name != "local"):
        tree = ast.parse(file.read_text())
        inside = {
            n
            for f in ast.walk(tree)
            if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
            for n in ast.walk(f)
        }
        typing = {
            n
            for i in tree.body
            if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.unparse(i.test)
            for n in ast.walk(i)
        }
        found = [
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("node.local")
        ]
        assert not [n for n in found if n not in inside | typing], file
        assert not found or file.name in ("assembly.py", "checks.py")
