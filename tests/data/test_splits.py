"""Files that make up a split, by the rules of the library `datasets`."""

import fsspec
import pytest

from node.core.errors import UsageFault
from node.data.splits import card_of, configurations, files_of_split


@pytest.mark.parametrize(
    ("names", "card", "config", "found"),
    [
        (["train/0.jsonl", "train_test/test-0.jsonl"], {}, "", ["train/0.jsonl"]),
        (["shard_00001.parquet", "shard_00000.parquet", "notes.txt"], {}, "",
         ["shard_00000.parquet", "shard_00001.parquet"]),
        (["data/en/train.parquet", "data/de/train.parquet"],
         {"a": {"data_dir": "data/en"}}, "", ["data/en/train.parquet"]),
        (["en/x.parquet", "de/x.parquet"], {}, "de", ["de/x.parquet"]),
        (["a.csv", "b.csv"], {"one": {"data_files": "a.csv"}, "two": {"data_files": "b.csv"}},
         "two", ["b.csv"]),
        (["a.csv", "b.csv"],
         {"one": {"data_files": "a.csv"}, "two": {"data_files": "b.csv", "default": True}},
         "", ["b.csv"]),
        (["d/a.csv"], {"x": {"data_files": [{"split": "train", "path": ["./d/*"]}]}}, "x",
         ["d/a.csv"]),
        (["data/train-00000-of-00001.parquet", "data/dev-00000-of-00001.parquet"], {}, "",
         ["data/train-00000-of-00001.parquet"]),
    ],
)  # fmt: skip
def test_files_of_the_training_split_are_chosen(names, card, config, found):
    assert files_of_split(names, card, config, "train", of_one_form=True) == found


@pytest.mark.parametrize(
    "path", ["/etc/*", "../*", "http://127.0.0.1/x.csv", "zip://*::x.zip", "file:///etc/*"]
)
def test_a_card_names_files_of_its_own_data_set_alone(path, monkeypatch):
    opened = list[str]()
    found = fsspec.core.get_filesystem_class
    monkeypatch.setattr(
        fsspec.core, "get_filesystem_class", lambda name: opened.append(name) or found(name)
    )
    for card in ({"data_files": path}, {"data_dir": path.strip("/*")}, {"data_dir": f"a::{path}"}):
        with pytest.raises(UsageFault, match="no files of 'train'"):
            files_of_split(["a.csv", "b/a.csv"], {"x": card}, "x", "train")
    assert {*opened} <= {"memory"}


def test_a_card_of_a_stranger_takes_no_long_time():
    card = {"x": {"data_files": "*a" * 9 + "*b"}}  # minutes, where it is compared
    with pytest.raises(UsageFault, match="no files of 'train'"):
        files_of_split(["a" * 250 + ".csv"], card, "x", "train")
    card = {"x": {"data_files": "**/" * 4 + "*.csv"}}
    with pytest.raises(UsageFault, match="no files of 'train'"):
        files_of_split(["a/b/c/d/e.csv"], card, "x", "train")
    names = [f"{i}.csv" for i in range(300)]
    assert files_of_split(names, {"x": {"data_files": names}}, "x", "train") == sorted(names)
    many = {"x": {"data_files": [f"{i}*" for i in range(300)]}}
    with pytest.raises(UsageFault, match="the card has 300 patterns"):
        files_of_split(names, many, "x", "train")


@pytest.mark.parametrize("names", [["data/a\n-00000-of-00001.txt"], ["a.txt", "a.txt/b.txt"]])
def test_names_that_the_library_does_not_understand_are_a_fault(names):
    with pytest.raises(UsageFault, match="no files of 'train'"):
        files_of_split(names, {}, "", "train")


def test_the_time_for_many_names_grows_with_their_number(monkeypatch):
    memory = fsspec.get_filesystem_class("memory")
    looked = list[str]()
    exists = memory.exists
    monkeypatch.setattr(
        memory, "exists", lambda self, path: looked.append(path) or exists(self, path)
    )
    names = [f"{i % 7}/{i:03}.txt" for i in range(200)]
    assert files_of_split(names, {}, "", "train") == sorted(names)
    assert len(looked) < 100  # each call looks through all names
    assert not memory.store


def test_what_is_not_there_is_said_with_what_there_is():
    with pytest.raises(UsageFault, match="no files of 'dev'") as fault:
        files_of_split(["train.csv", "test.csv"], {}, "", "dev")
    assert fault.value.next_step == "the splits are: test, train"
    with pytest.raises(UsageFault, match="no configuration and no directory 'fr'") as fault:
        files_of_split(["train.csv"], {"en": {}}, "fr", "train")
    assert fault.value.next_step == "the configurations are: en"


def test_the_card_at_the_beginning_of_a_readme():
    assert card_of("---\nconfigs:\n- config_name: en\n  data_dir: x\n---\n# Hi") == {
        "en": {"config_name": "en", "data_dir": "x"}
    }
    for text in ("# Hi", "---\n[\n---\n", "---\n- 3\n---\n", "---\nconfigs: 3\n---\n"):
        assert card_of(text) == {}
    assert configurations(None) == {}
