"""The dashboard for Grafana and the example for Prometheus: they ask for what daemons export."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import reference

ROW = re.compile(r"(?m)^\| `(tutti_\w+)` \| (\w+) \| (.*?) \|")
PARTS = {"histogram": ("_bucket", "_sum", "_count")}
"""Suffixes of the names under which a metric of that kind is stored."""
OWN = {"run", "peer"}
"""Labels that the scraper adds."""


@pytest.fixture(scope="module")
def exported() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of everything that a daemon exports, by the name in a query."""
    found: dict[str, tuple[str, set[str]]] = {}
    for name, kind, labels in ROW.findall(reference.metrics()):
        for part in PARTS.get(kind, ("",)):
            own = {*re.findall(r"`(\w+)`", labels)}
            if part == "_bucket":
                own.add("le")
            found[name + part] = kind, own
    return found


@pytest.fixture(scope="module")
def dashboard(root: Path) -> dict[str, Any]:
    return json.loads((root / "deploy/grafana/tutti.json").read_text())


@pytest.fixture(scope="module")
def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return dashboard["panels"]


@pytest.fixture(scope="module")
def scrapes(root: Path) -> list[dict[str, Any]]:
    text = (root / "deploy/prometheus/prometheus.yml").read_text()
    return yaml.safe_load(text)["scrape_configs"]


def queries(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        for target in panel.get("targets", ()):
            yield target["expr"]


def test_every_query_asks_for_what_daemons_export(
    panels: list[dict[str, Any]], exported: dict[str, tuple[str, set[str]]]
) -> None:
    asked = list(queries(panels))
    assert len(asked) >= 30
    for query in asked:
        names = re.findall(r"tutti_\w+", query)
        assert names, query
        assert {*names} <= exported.keys(), query
        known = OWN.union(*(exported[name][1] for name in names))
        for words in re.findall(r"\bby \(([^)]*)\)", query):
            assert {*words.split(", ")} <= known, query
        for selector in re.findall(r"\{([^}]*)\}", query):
            assert selector.startswith('run=~"$run", peer=~"$peer"'), query
            assert {*re.findall(r"(\w+)=~?", selector)} <= known, query


def test_counters_are_asked_for_their_growth_and_gauges_are_not(
    panels: list[dict[str, Any]], exported: dict[str, tuple[str, set[str]]]
) -> None:
    """Where a counter is shown as it is, its total since the daemon's start is meant."""
    for query in queries(panels):
        for name in re.findall(r"tutti_\w+", query):
            grows = re.search(rf"(rate|increase)\({name}\{{[^}}]*\}}\[\$__rate_interval\]\)", query)
            shown_whole = name == "tutti_tokens_total"
            assert bool(grows) == (exported[name][0] != "gauge" and not shown_whole), query


def test_titles_and_numbers_of_panels_are_unique_and_no_two_overlap(
    panels: list[dict[str, Any]],
) -> None:
    assert [t for t, n in Counter(panel["title"] for panel in panels).items() if n > 1] == []
    assert [t for t, n in Counter(panel["id"] for panel in panels).items() if n > 1] == []
    cells = Counter[tuple[int, int]]()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for y in range(at["y"], at["y"] + at["h"]):
            cells.update((x, y) for x in range(at["x"], at["x"] + at["w"]))
    assert max(cells.values()) == 1


def test_every_panel_says_what_it_shows_and_takes_the_chosen_data_source(
    panels: list[dict[str, Any]],
) -> None:
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        sources = [panel["datasource"], *(t["datasource"] for t in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}


def test_the_variables_are_the_labels_that_the_example_adds(
    dashboard: dict[str, Any], scrapes: list[dict[str, Any]]
) -> None:
    variables = {v["name"]: v["query"] for v in dashboard["templating"]["list"]}
    assert variables.keys() == {"datasource", *OWN}
    for name in OWN:
        assert re.fullmatch(rf"label_values\(tutti_epoch.*, {name}\)", variables[name]["query"])
    for group in scrapes[0]["static_configs"]:
        assert group["labels"].keys() == OWN
        assert all(re.fullmatch(r"127\.0\.0\.1:[0-9]+", target) for target in group["targets"])
