"""Numbers in, a valid exposition out, on loopback only."""

import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.telemetry.metrics import Metrics


def scrape(url: str) -> dict[tuple[str, tuple], float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics()
    yield made
    made.close()


def test_a_scrape_reads_back_what_was_counted(metrics: Metrics) -> None:
    metrics.relay_clients.set(7)
    metrics.bans_total.inc(2)
    metrics.bytes_sent_total.labels(plane="pipeline").inc(10)
    metrics.time_spent("compute", 1.5)
    url = metrics.serve()
    found = scrape(url)
    metrics.close()
    assert url.startswith("http://127.0.0.1:"), "nobody outside can read them"
    counted = {
        ("tutti_relay_clients", ()): 7,
        ("tutti_bans_total", ()): 2,
        ("tutti_bytes_sent_total", (("plane", "pipeline"),)): 10,
        ("tutti_time_seconds_total", (("kind", "compute"),)): 1.5,
    }
    assert {key: found.get(key) for key in counted} == counted
    assert all(name.startswith("tutti_") for name, _ in found)


def test_totals_show_where_the_time_went(metrics: Metrics) -> None:
    metrics.time_spent("wire", 0.25)
    metrics.time_spent("wire", 0.5)
    metrics.time_spent("wait", -3.0)
    assert metrics.totals() == {"compute": 0.0, "wire": 0.75, "wait": 0.0, "round": 0.0}
    with pytest.raises(KeyError):
        metrics.time_spent("lunch", 1.0)


def test_a_taken_port_is_for_the_caller_to_explain(metrics: Metrics) -> None:
    port = int(metrics.serve().rpartition(":")[2].partition("/")[0])
    with pytest.raises(OSError, match="in use"):
        Metrics().serve(port)
