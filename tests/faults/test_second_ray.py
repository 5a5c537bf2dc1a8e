"""A process that has one Ray after another, as a notebook that starts again has."""

import time
from collections.abc import Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import ray

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.cluster.object_store import LARGE_PLAN_BYTES
from ray_fed.program import ClientData

import tensorflow as tf  # isort: skip

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]

MEMBER = fl.TensorType(np.float32, [3])
LARGE = np.random.default_rng(0).random(LARGE_PLAN_BYTES // 4, np.float32)


@rtf.computation(MEMBER)
def work(x: Any) -> Any:
    return x * tf.reduce_sum(LARGE)  # a graph that is stored, too: it has the constant


@fl.federated_computation(fl.FederatedType(MEMBER, fl.CLIENTS))
def total(values: Any) -> Any:
    return fl.federated_sum(fl.federated_map(work, values))


def test_data_and_graphs_of_one_ray_serve_the_next() -> None:
    values = [np.full(3, k, np.float32) for k in range(6)]
    data = ClientData.from_values(values, MEMBER)
    config = ray_fed.Config(workers=1)
    found: list[bytes] = []

    for _ in range(2):
        with ray_fed.create_context(config, address="local") as context:
            found += [np.asarray(context.invoke(total, data)).tobytes()]

    assert found[0] == found[1]
    expected = np.sum(values, 0) * LARGE.sum()
    np.testing.assert_allclose(np.frombuffer(found[0], np.float32), expected, rtol=1e-4)


def start_ray() -> None:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)


@pytest.fixture
def left_to_end() -> Iterator[None]:
    """Whatever a test leaves is shut down."""
    yield
    ray_fed.shutdown()
    ray.shutdown()


@pytest.mark.usefixtures("left_to_end")
def test_ray_that_the_user_shuts_down_is_missed_and_never_started() -> None:
    values = [np.full(3, k, np.float32) for k in range(6)]
    config = ray_fed.Config(workers=1)
    start_ray()
    context = ray_fed.init(config=config)
    expected = np.asarray(context.invoke(total, values)).tobytes()

    ray.shutdown()
    time.sleep(1.0)  # timers of leases that were kept come after half a second
    assert not ray.is_initialized()
    assert not context.is_open
    with pytest.raises(errors.ContextStateError, match=r"`ray\.shutdown` was called"):
        context.invoke(total, values)
    start_ray()
    with pytest.raises(errors.ContextStateError, match=r"`ray\.shutdown` was called"):
        context.invoke(total, values)
    context.close()
    assert ray.is_initialized()  # it is the user's

    again = ray_fed.init(config=config)
    assert np.asarray(again.invoke(total, values)).tobytes() == expected
