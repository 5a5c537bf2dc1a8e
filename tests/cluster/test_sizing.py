"""How many workers there are to be, and what is said where they find no room."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed.cluster import inventory, pool


def size_of(
    workers: Any,
    bundles: Sequence[Mapping[str, float]],
    held: Mapping[str, float] | None = None,
) -> tuple[int, int]:
    """Return the least and the most workers in what bundles have left."""
    config = ray_fed.Config(workers=workers)
    size = pool.decide_size(config, bundles, may_grow=False, occupied=held)
    return size.least, size.most


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param({}, (1, 3), id="one a bundle"),
        pytest.param({"num_cpus": 2}, (1, 1), id="large ones"),
        pytest.param((1, 9), (1, 9), id="range"),
    ],
)
def test_workers_follow_the_bundles_beside_the_process(
    workers: Any, expected: tuple[int, int]
) -> None:
    bundles = [{"CPU": 0.0}, {"CPU": 1.0}, {"CPU": 2.0}]

    assert size_of(workers, bundles, {"CPU": 1.0}) == expected


@pytest.mark.parametrize(
    ("workers", "advice"),
    [
        pytest.param({}, '2 bundles: [{"CPU": 1}] + [{"CPU": 1}] * 1', id="one"),
        pytest.param(3, '4 bundles: [{"CPU": 1}] + [{"CPU": 1}] * 3', id="three"),
        pytest.param(
            {"count": (2, 4), "num_cpus": 2, "num_gpus": 1},
            '3 bundles: [{"CPU": 1}] + [{"CPU": 2, "GPU": 1}] * 2',
            id="range with GPUs",
        ),
    ],
)
def test_too_few_bundles_are_an_error_that_says_which_to_ask_for(
    workers: Any, advice: str
) -> None:
    with pytest.raises(errors.ResourceError) as raised:
        size_of(workers, [{"CPU": 0.0}], {"CPU": 1.0})

    count, bundles = advice.split(": ", 1)
    assert "found room for 0 beside the process" in str(raised.value)
    assert f"ask for {count}, the first for the process" in str(raised.value)
    assert f"tune.PlacementGroupFactory({bundles})" in str(raised.value)
    assert 'backend="local"' in str(raised.value)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param({"CPU": 1.0}, [{"CPU": 0.0}, {"CPU": 2.0}], id="the first"),
        pytest.param({"CPU": 2.0}, [{"CPU": 1.0}, {"CPU": 0.0}], id="where it fits"),
        pytest.param({}, [{"CPU": 1.0}, {"CPU": 2.0}], id="nothing"),
    ],
)
def test_process_has_its_part_of_a_bundle(
    held: dict[str, float], expected: list[dict[str, float]]
) -> None:
    bundles = [{"CPU": 1.0}, {"CPU": 2.0}]

    assert inventory.without(bundles, held) == expected
