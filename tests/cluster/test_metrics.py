"""Metrics: their names and labels, which a dashboard of Grafana and a page repeat."""

import json
import pathlib
import re
from typing import Any

import pytest
from ray.util.metrics import Metric

from ray_fed.cluster.metrics import RoundMetrics, workers_ready

_ROOT = pathlib.Path(__file__).parents[2]
_NAME = re.compile(r"\bray_fed_\w+")
_LABELS = re.compile(r"\{(\w+)=~|by \(([\w, ]+)\)")

_EXPORTED = {
    "Counter": ("{}_total",),
    "Gauge": ("{}",),
    "Histogram": ("{}_bucket", "{}_count", "{}_sum"),
}
"""What Ray makes of the name of a metric, behind "ray_"."""


@pytest.fixture(scope="module")
def built() -> list[Metric]:
    """All metrics of a run."""
    metrics = [*vars(RoundMetrics("digits")).values(), workers_ready("digits")]
    return [metric for metric in metrics if isinstance(metric, Metric)]


def exported(built: list[Metric]) -> dict[str, set[str]]:
    """Return the labels of all metrics, by the names that Prometheus has."""
    return {
        "ray_" + form.format(metric.info["name"]): {*metric.info["tag_keys"]}
        for metric in built
        for form in _EXPORTED[type(metric).__name__]
    }


@pytest.fixture(scope="module")
def dashboard() -> Any:
    path = _ROOT / "examples/clusters/grafana.json"
    return json.loads(path.read_text(encoding="utf-8"))


def queries(dashboard: Any) -> list[str]:
    """Return all queries of Prometheus in a dashboard."""
    panels = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
    variables = dashboard["templating"]["list"]
    return panels + [v["definition"] for v in variables if v["type"] == "query"]


def test_every_metric_has_the_name_of_the_run(built: list[Metric]) -> None:
    assert len(built) == 8
    for metric in built:
        assert metric.info["default_tags"] == {"run": "digits"}
        assert {"run"} <= {*metric.info["tag_keys"]} <= {"run", "failure"}


def test_dashboard_shows_every_metric_and_no_other(
    built: list[Metric], dashboard: Any
) -> None:
    known = exported(built)
    queried = {name for query in queries(dashboard) for name in _NAME.findall(query)}

    assert queried <= set(known)
    bases = {re.sub("_(bucket|count|sum)$", "", name) for name in known}
    assert {re.sub("_bucket$", "", name) for name in queried} == bases


def test_dashboard_groups_by_labels_that_its_metrics_have(
    built: list[Metric], dashboard: Any
) -> None:
    known = exported(built)
    for query in queries(dashboard):
        (name,) = set(_NAME.findall(query))
        labels = {
            label.strip()
            for found in _LABELS.findall(query)
            for label in ",".join(found).split(",")
        } - {""}

        assert labels <= known[name] | ({"le"} if name.endswith("_bucket") else set())


def test_every_panel_is_whole(dashboard: Any) -> None:
    panels = dashboard["panels"]
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}

    assert len({panel["id"] for panel in panels}) == len(places) == len(panels)
    assert all(panel["title"] and panel["description"] for panel in panels)
    for query in queries(dashboard):
        assert query.count("(") == query.count(")")
        assert query.count("{") == query.count("}")


def test_page_lists_the_metrics(built: list[Metric]) -> None:
    page = (_ROOT / "docs/dashboards.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(ray_fed_\w+)` \|", page, re.MULTILINE))

    assert listed == {
        re.sub("_(bucket|count|sum)$", "", name) for name in exported(built)
    }
