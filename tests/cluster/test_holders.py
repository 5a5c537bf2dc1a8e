"""What names clients by reference in an argument."""

from typing import Any

import numpy as np
import pytest

from ray_fed.cluster.pool import name_clients
from ray_fed.values.client_references import ClientRun


class Source:
    """Stands for a source of clients, which nobody reads."""

    def __init__(self, token: str) -> None:
        self.token = token


def run(token: str, *positions: int) -> ClientRun:
    source: Any = Source(token)
    type_spec: Any = None
    return ClientRun(source, type_spec, np.array(positions, np.int64))


def test_equal_clients_have_one_name() -> None:
    first = (np.float32(1), (run("a", 3, 4), run("b", 0)))
    second = (np.float32(2), (run("a", 3, 4), run("b", 0)))

    assert name_clients(first) == name_clients(second) != b""


@pytest.mark.parametrize(
    "other",
    [
        (run("a", 3), run("b", 0, 4)),
        (run("a", 4, 3), run("b", 0)),
        (run("b", 3, 4), run("a", 0)),
        (run("a", 3, 4),),
        run("a", 3, 4, 0),
    ],
    ids=["cut", "order", "sources", "fewer", "joined"],
)
def test_other_clients_have_another_name(other: Any) -> None:
    assert name_clients(other) != name_clients((run("a", 3, 4), run("b", 0)))


@pytest.mark.parametrize("argument", [None, (), [1.0, 2.0], (np.float32(1), [2.0])])
def test_values_have_no_name(argument: Any) -> None:
    assert name_clients(argument) == b""
