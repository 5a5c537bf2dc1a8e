"""Ids and weights of clients that are legal, or that may not be."""

# pyright: reportUnknownLambdaType=false

import decimal
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ray_fed import errors
from ray_fed.program import ClientData
from tests.properties.malformed import REFUSED, Case, Expected, Place, Right
from tests.properties.malformed_arguments import MAKERS

_MORE = (0, 1, 2.5, np.float32(0.5), np.int64(3), "ann", ("a", 1), (1, [2]), b"c")
_LARGEST = float(np.finfo(np.float64).max)


def _drawn(generator: random.Random) -> Any:
    if generator.random() < 0.7:
        return generator.choice(_MORE)
    return generator.choice(MAKERS)()


def clients(generator: random.Random, place: Place) -> Iterator[Case]:
    """Yield data of clients whose ids or weights may not be legal."""
    del place
    while True:
        values = [_drawn(generator) for _ in range(generator.randrange(4))]
        ids = list(range(len(values) + (generator.random() < 0.1)))
        yield _case(ids, values, _expected_of_weights(ids, values))
        yield _case(values, None, _expected_of_ids(values))


def _case(ids: Sequence[Any], weights: Any, expected: Expected) -> Case:
    def run() -> Any:
        data = ClientData.from_function(ids, lambda _: 0, np.int32, weights)
        return [(client.id, client.weight) for client in data]

    label = f"ids {errors.describe(ids)}, weights {errors.describe(weights)}"
    return Case("clients", label, run, expected)


def _expected_of_weights(ids: Sequence[Any], values: Sequence[Any]) -> Expected:
    if len(ids) != len(values) or not all(map(_is_weight, values)):
        return REFUSED
    numbers = [float(value) for value in values]
    return Right(list(zip(ids, numbers, strict=True)))


def _is_weight(value: Any) -> bool:
    legal = (int, float, np.integer, np.floating)
    if isinstance(value, bool | np.bool_ | decimal.Decimal):
        return False
    if not isinstance(value, legal) or (isinstance(value, int) and value > _LARGEST):
        return False
    return math.isfinite(value) and bool(value >= 0)


def _expected_of_ids(ids: Sequence[Any]) -> Expected:
    try:
        distinct = set(ids)
    except TypeError:
        return REFUSED
    # None, NaN, NaT and NA say that there is none: all but None differ from themselves.
    if len(distinct) < len(ids) or any(i is None or i != i for i in ids):  # noqa: PLR0124
        return REFUSED
    return Right([(client, None) for client in ids])
