"""The generated code matches protos/*.proto and today's compiler, and every call of the contract is
explained."""

import re
from pathlib import Path

import grpc_tools.protoc
import pytest


def test_generated_code_is_up_to_date(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    files = sorted(str(p.relative_to(root)) for p in (root / "protos").glob("*.proto"))
    assert files
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    assert grpc_tools.protoc.main(["protoc", "-I.", *out, *files]) == 0
    made = {p.name: p.read_text() for p in (tmp_path / "protos").iterdir()}
    kept = {
        p.name: p.read_text()
        for p in (root / "protos").iterdir()
        if "_pb2" in p.name and p.is_file()
    }
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == [], "run  make protos"


def test_every_proto_file_and_enum_value_is_commented(root: Path) -> None:
    for file in (root / "protos").glob("*.proto"):
        text = file.read_text()
        assert text.startswith("//"), f"{file.name} begins with what it is for"
        assert re.search(r"^package tutti\.(\w+\.)?v1;$", text, re.MULTILINE), (
            f"{file.name}: its own package, and a version"
        )
        for name, body in re.findall(r"^enum (\w+) \{\n(.*?)\n\}", text, re.DOTALL | re.MULTILINE):
            lines = [line.strip() for line in body.splitlines() if line.strip()]
            assert re.match(r"\w*UNSPECIFIED = 0;", lines[0]), (
                f"{name}: zero means nothing was said"
            )
            assert all("//" in line for line in lines[1:]), (
                f"{name}: every value says what it means"
            )
