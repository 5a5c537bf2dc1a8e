"""What is made of a computation is made once, and ends with it."""

import gc
import weakref
from typing import Any

import federated_language as fl
import numpy as np

from ray_fed.language import blocks
from ray_fed.rounds.execution import ComputationCache


def computation(value: int) -> Any:
    @fl.federated_computation(np.int32)
    def constant(_: Any) -> Any:
        return value

    return constant


def test_made_once_for_the_same_object_and_for_equal_ones() -> None:
    made: list[Any] = []
    cache = ComputationCache(lambda comp: made.append(comp) or len(made))
    one = computation(1)
    equal = blocks.deserialize_computation(blocks.serialize_computation(one))

    found = [cache.get(comp) for comp in (one, one, equal, computation(2), one)]

    assert found == [1, 1, 1, 2, 1]


def test_the_oldest_is_made_again_once_there_are_many() -> None:
    made: list[Any] = []
    cache = ComputationCache(lambda comp: made.append(comp) or len(made))
    comps = [computation(value) for value in range(129)]
    for comp in comps:
        cache.get(comp)

    cache.get(comps[-1])
    cache.get(comps[0])

    assert made == [*comps, comps[0]]


def test_what_was_made_ends_with_the_computation_but_for_the_latest() -> None:
    made: list[int] = []

    class Made:
        def __init__(self) -> None:
            made.append(1)
            weakref.finalize(self, made.pop)

    cache = ComputationCache(lambda _: Made())
    living = [computation(value) for value in range(40)]
    assert len([*map(cache.get, living)]) == len(made) == 40

    living.clear()
    gc.collect()

    assert 1 <= len(made) < 20
