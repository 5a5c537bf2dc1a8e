"""Connecting: what is not there is said at once."""

from typing import Any

import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed.cluster import session


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"count": 10_000}, "Expected 10000 CPU for 10000 `workers`"),
        ({"count": (10_000, 20_000)}, "Expected 10000 CPU for 10000 `workers`"),
        ({"count": 1000, "num_gpus": 1, "num_cpus": 1e-4}, "Expected 1000 GPU"),
        ({"count": 1, "resources": {"tpu": 1}}, "Expected 1 tpu for 1 `workers`"),
        ({"count": 1, "num_cpus": 10_000}, "Expected 10000 CPU for 1 `workers`"),
    ],
    ids=["count", "range", "GPUs", "resource", "large"],
)
def test_more_than_this_machine_has_is_refused_before_ray_starts(
    workers: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**_: Any) -> None:
        pytest.fail("Ray was started")

    monkeypatch.setattr(session.ray, "init", start)

    with pytest.raises(errors.ResourceError, match=message):
        ray_fed.create_context(ray_fed.Config(workers=workers), address="local")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"count": 64}, "Expected 64 CPU for 64 `workers`, found 16"),
        ({"count": (10_000, 20_000)}, "Expected 10000 CPU for 10000 `workers`"),
        ({"count": (1, 2), "num_cpus": 10_000}, "Expected 10000 CPU for 1 `workers`"),
        ({"count": (1, 2), "resources": {"tpu": 1}}, "Expected 1 tpu for 1 `workers`"),
    ],
    ids=["fixed", "many", "large", "resource"],
)
def test_more_than_the_ray_of_this_process_has_is_refused(
    workers: dict[str, Any], message: str
) -> None:
    config = ray_fed.Config(workers=workers)

    with pytest.raises(errors.ResourceError, match=message):
        ray_fed.create_context(config, address="local")
