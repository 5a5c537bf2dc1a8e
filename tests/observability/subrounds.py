"""Subrounds that ended, for tests of what is told of them."""

from typing import Any

from ray_fed.observability import events
from ray_fed.observability.report import SubroundReport

_FIELDS: dict[str, Any] = {
    "subround_index": 0,
    "num_clients": 5,
    "attempts": 1,
    "started_s": 0.0,
    "seconds": 0.25,
    "worker": "w",
    "worker_pid": 100,
    "coordinator_pid": 200,
    "node": "10.0.0.1",
}


def finished(round_index: int = 4, **fields: Any) -> events.SubroundFinished:
    return events.SubroundFinished(round_index=round_index, **_FIELDS | fields)


def reported(**fields: Any) -> SubroundReport:
    return SubroundReport(**_FIELDS | fields)
