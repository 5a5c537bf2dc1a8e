"""A pool on real clusters whose nodes come and go, in processes of their own."""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

SCRIPT = pathlib.Path(__file__).with_name("elastic_script.py")


def _tell(story: str, scratch: pathlib.Path) -> dict[str, Any]:
    """Run a story; return what it told."""
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), story],
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
        env={**os.environ, "SCRATCH": str(scratch)},
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads((scratch / "told.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def come_and_go(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _tell("come_and_go", tmp_path_factory.mktemp("come_and_go"))


@pytest.mark.parametrize(
    "change",
    [
        "one node",
        "second node",
        "third node",
        "third lost",
        "second drains",
        "fourth node",
    ],
)
def test_rounds_follow_the_nodes_and_bits_do_not(
    come_and_go: dict[str, Any], change: str
) -> None:
    told = come_and_go[change]

    assert told["reached"]
    assert told["bits"] == come_and_go["one node"]["bits"]
    assert len(told["bits"]) == 1


def test_what_is_missing_waits_where_an_autoscaler_sees_it(
    come_and_go: dict[str, Any],
) -> None:
    asked = {name: n for name, n in come_and_go.items() if name.startswith("requested")}

    assert asked == {
        "requested with one node": 2,
        "requested with three nodes": 0,
        "requested with two nodes": 1,
        "requested with fourth node": 2,
        "requested at the end": 0,
    }


def test_no_room_is_an_error_within_the_configured_time(
    come_and_go: dict[str, Any],
) -> None:
    assert "Expected at least 1 workers (`workers.count`)" in come_and_go["error"]
    assert "`workers.wait_timeout_s`" in come_and_go["error"]
    assert 12.0 <= come_and_go["error after"] < 90.0


def test_closed_context_leaves_no_worker(come_and_go: dict[str, Any]) -> None:
    assert come_and_go["workers at the end"] == 0


@pytest.fixture(scope="module")
def minimum(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _tell("minimum", tmp_path_factory.mktemp("minimum"))


def test_round_waits_for_the_minimum_while_nodes_come(minimum: dict[str, Any]) -> None:
    said = re.sub(r"\d+ s:", "5 s:", minimum["said"])

    assert said.startswith("A call has waited for 5 s: waiting for room for 2 workers:")
    assert "2 CPU (0 of 0 free)" in said
    assert minimum["subrounds"] == minimum["subrounds later"] == 2


def test_pool_below_the_minimum_is_an_error_in_time(minimum: dict[str, Any]) -> None:
    assert "Expected at least 2 workers (`workers.count`)" in minimum["error"]
    limit = r"found 1 after \d+ s \(`workers.wait_timeout_s`\)"
    assert re.search(limit, minimum["error"])
    assert 12.0 <= minimum["error after"] < 90.0
