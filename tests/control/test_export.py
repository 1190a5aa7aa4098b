"""What ``tutti export`` asks of the swarm."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.app import operator_service
from node.checkpoint.state import NoDonor
from node.core.errors import NetworkFault
from node.manifest import Manifest


async def test_an_export_that_fails_fetches_nothing_more(tmp_path: Path, monkeypatch) -> None:
    manifest, under_way = Manifest.default_demo(), set[int]()

    async def fetch(transport: Any, donors: Any, stage: int, *_: Any, **__: Any) -> None:
        if stage == manifest.pipeline.stages:
            raise NoDonor("it", {})
        under_way.add(stage)
        try:
            await asyncio.Event().wait()
        finally:
            under_way.remove(stage)

    monkeypatch.setattr(operator_service, "fetch", fetch)
    monkeypatch.setattr(operator_service, "ATTEMPTS", 1)
    engines = SimpleNamespace(store=SimpleNamespace(settings=None))
    work = SimpleNamespace(plan=SimpleNamespace(stage=lambda stage: []), engines=engines)
    a: Any = SimpleNamespace(manifest=manifest, work=work, tokenizer=object())
    a.stage = SimpleNamespace(stage=-1)
    with pytest.raises(NetworkFault, match=f"stage {manifest.pipeline.stages}"):
        await anext(operator_service.gather(a, None, tmp_path, None))  # type: ignore[arg-type]
    assert not under_way
