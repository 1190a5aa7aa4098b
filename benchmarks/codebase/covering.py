"""Plugin of pytest that notes which tests run which lines of some files, and the seconds of
each."""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


class Covering:
    """Lines of ``files`` by test, written to ``into`` when the session ends."""

    def __init__(self, files: set[str], into: Path) -> None:
        self._files = files
        self._into = into
        self._tests: dict[str, set[str]] = defaultdict(set)
        """Names of tests, by "file:line"."""
        self._seconds: dict[str, float] = {}
        self._test = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Fixtures count as parts of the test."""
        self._test = item.nodeid
        began = time.perf_counter()
        sys.settrace(self._enters)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self._seconds[item.nodeid] = time.perf_counter() - began

    def pytest_sessionfinish(self) -> None:
        found = {line: sorted(tests) for line, tests in self._tests.items()}
        self._into.write_text(json.dumps({"tests": found, "seconds": self._seconds}))

    def _enters(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename in self._files:
            return self._runs
        return None

    def _runs(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._tests[f"{frame.f_code.co_filename}:{frame.f_lineno}"].add(self._test)
        return self._runs
