"""``tutti partition``: the document, the picture, and every way to ask for the impossible."""

import json

import pytest

from cli import main
from node.core.errors import OutOfResources, UsageFault
from node.tools import partition as command

GOOD = {
    "matrices": [
        {"name": "qkv", "rows": 768, "cols": 256, "splits": {"q": 512, "k": 128, "v": 128}},
        {"name": "fc1", "rows": 1024, "cols": 256, "splits": 2},
        {"name": "o", "rows": 256, "cols": 512},
        {"name": "down", "rows": 256, "cols": 512, "splits": [128, 128]},
    ],
    "ranks": 3,
    "method": "muon",
}


def ask(capsys, tmp_path, document, *words):
    path = tmp_path / "m.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return main(["partition", str(path), *words]), *capsys.readouterr()


def answer(document):
    return command.document(command.planned(document))


def test_json_has_owners_ratios_and_the_hash(capsys, tmp_path):
    code, out, _ = ask(capsys, tmp_path, GOOD, "--json")
    said = json.loads(out)
    assert code == 0
    assert set(said) == {"owner", "makespan_over_ideal", "floor_over_ideal", "bytes_moved", "hash"}
    assert set(said["owner"]) == {
        "qkv[q]",
        "qkv[k]",
        "qkv[v]",
        "fc1[0]",
        "fc1[1]",
        "o",
        "down[0]",
        "down[1]",
    }
    assert set(said["owner"].values()) <= {0, 1, 2}
    assert 1 <= said["floor_over_ideal"] <= said["makespan_over_ideal"]
    assert said["bytes_moved"] == 0
    again = answer({**GOOD, "previous": said["owner"]})
    assert (again["owner"], again["bytes_moved"], again["hash"]) == (said["owner"], 0, said["hash"])


def test_a_whole_matrix_of_before_may_be_split_now():
    all_here = {"qkv": 0, "fc1": 0, "o": 0, "down": 0, "nobody": 5}
    for previous, moved in ((all_here, 0), ({"qkv": 1}, 4 * 768 * 256)):
        assert answer({**GOOD, "ranks": 1, "previous": previous})["bytes_moved"] == moved


def test_tensor_parallel_ranks_are_ranks():
    owners = answer({**GOOD, "ranks": 4, "tensor_parallel": 2})["owner"]
    assert set(owners.values()) <= set(range(4))


@pytest.mark.parametrize("method", ["muon", "shampoo", "soap", "adamw"])
def test_every_method_plans(method):
    assert answer({**GOOD, "method": method, "speeds": [1, 2.5, 4]})["makespan_over_ideal"] >= 1


def test_measured_rates_and_memory_are_heard():
    fast = answer({**GOOD, "rates": [[256, 512, 100.0], [128, 256, 1.0]]})
    assert fast["owner"] != answer(GOOD)["owner"]
    with pytest.raises(OutOfResources, match="room for more than 1000"):
        answer({**GOOD, "memory": 1000})


def test_the_picture_shows_loads_the_floor_and_unknown_fields(capsys, tmp_path):
    code, out, err = ask(capsys, tmp_path, {**GOOD, "coment": 1, "previous": {"o": 9}})
    assert code == 0
    assert out.count("█") > 30
    assert "floor" in out
    assert "× ideal" in out
    assert "coment" in err
    many = {"matrices": [{"name": f"w{i}", "rows": 64, "cols": 64} for i in range(10)], "ranks": 80}
    _, out, _ = ask(capsys, tmp_path, many)
    assert "and 32 ranks that are done no later" in out
    assert "70 ranks have nothing to do" in out


def without(key):
    return {k: v for k, v in GOOD.items() if k != key}


def one(**fields):
    return {**GOOD, "matrices": [{"name": "w", "rows": 8, "cols": 8, **fields}]}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ([], "not an object"),
        (without("matrices"), "matrices is missing"),
        (without("ranks"), "ranks is missing"),
        ({**GOOD, "matrices": []}, "matrices is not a list"),
        ({**GOOD, "matrices": {"w": 1}}, "matrices is not a list"),
        ({**GOOD, "matrices": [7]}, "matrix 0 has no name"),
        (one(name=""), "no name"),
        (one(name=3), "no name"),
        (one(rows=0), "rows of w is 0"),
        (one(rows=-4), "rows of w"),
        (one(rows=2.5), "rows of w"),
        (one(rows=True), "rows of w"),
        (one(cols=None), "cols of w"),
        (one(cols=1 << 40), "cols of w"),
        (one(splits=3), "3 equal splits do not divide"),
        (one(splits=0), "splits of w"),
        (one(splits=[4, 3]), "splits of w are 4+3"),
        (one(splits=[9, -1]), "splits of w"),
        (one(splits="qkv"), "splits of w"),
        ({**GOOD, "matrices": [{"name": "w", "rows": 8, "cols": 8}] * 2}, "w is there twice"),
        (
            {
                **GOOD,
                "matrices": [*one(splits=2)["matrices"], {"name": "w[0]", "rows": 8, "cols": 8}],
            },
            "w[0] is there twice",
        ),
        ({**GOOD, "ranks": 0}, "ranks is 0"),
        ({**GOOD, "ranks": "3"}, "ranks is 3"),
        ({**GOOD, "ranks": 10**9}, "ranks is 1000000000"),
        ({**GOOD, "tensor_parallel": 2}, "3 ranks are not whole groups of 2"),
        ({**GOOD, "tensor_parallel": 0}, "tensor_parallel is 0"),
        ({**GOOD, "speeds": [1, 2]}, "2 speeds for 3 ranks"),
        ({**GOOD, "speeds": [1, 2, 0]}, "rank 2 has speed 0"),
        ({**GOOD, "speeds": [1, 2, -1]}, "rank 2 has speed -1"),
        ({**GOOD, "speeds": [1, 2, "fast"]}, "rank 2 has speed fast"),
        ({**GOOD, "speeds": 3}, "no speeds for 3 ranks"),
        ({**GOOD, "method": "sgd"}, "no method is called 'sgd'"),
        ({**GOOD, "method": ["muon"]}, "no method"),
        ({**GOOD, "previous": [0]}, "previous is not an object"),
        ({**GOOD, "previous": {"o": "rank 1"}}, "previous owner of o"),
        ({**GOOD, "memory": [1, 2]}, "memory of 2 ranks"),
        ({**GOOD, "memory": -1}, "memory is -1"),
        ({**GOOD, "rates": [[1, 2]]}, "rates is not a list"),
        ({**GOOD, "rates": [[64, 64, 0]]}, "not a rate"),
    ],
)
def test_input_that_cannot_be_used(document, says):
    with pytest.raises(UsageFault) as caught:
        answer(document)
    assert says in caught.value.what
    assert caught.value.next_step


@pytest.mark.parametrize(
    "text", ["", "{", '{"ranks": NaN}', "[" * 100_000, '{"ranks": 1e999}', "\x00"]
)
def test_files_that_are_no_document(capsys, tmp_path, text):
    code, out, err = ask(capsys, tmp_path, text, "--json")
    assert code == 2
    assert json.loads(out)["next_step"]
    assert "Traceback" not in err


def test_a_file_that_cannot_be_read_is_refused(capsys, tmp_path):
    assert main(["partition", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["partition", str(tmp_path)]) == 2
