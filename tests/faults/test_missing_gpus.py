"""Ray counts GPUs on a machine where TensorFlow sees none."""

import time
from collections.abc import Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import ray
import tensorflow as tf

import ray_fed
import ray_fed.errors as errors

pytestmark = [
    pytest.mark.ray,
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(tf.config.list_physical_devices("GPU")), reason="TensorFlow sees a GPU"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _ray_with_gpus() -> Iterator[None]:
    options: Any = {"log_to_driver": False, "include_dashboard": False}
    ray.init(address="local", num_cpus=2, num_gpus=2, **options)
    yield
    ray.shutdown()


@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def total(clients: Any) -> Any:
    return fl.federated_sum(clients)


def test_call_runs_on_the_group_that_it_names() -> None:
    config = ray_fed.Config(
        workers=ray_fed.Workers(count=1, num_cpus=0.5),
        worker_groups={"gpu": ray_fed.Workers(count=1, num_cpus=0.5, num_gpus=1)},
    )
    with ray_fed.create_context(config) as context:
        with (
            context.on_workers("gpu"),
            pytest.raises(errors.ResourceError, match="Expected a GPU for TensorFlow"),
        ):
            context.invoke(total, [1, 2])
        assert context.invoke(total, [1, 2]) == 3


@pytest.mark.parametrize(
    ("count", "num_gpus", "allow_mixed"),
    [
        pytest.param(1, 1.0, False, id="one"),
        pytest.param(2, 0.25, False, id="two fractions"),
        pytest.param((1, 2), 0.5, True, id="range of fractions, mixed"),
    ],
)
def test_gpu_that_tensorflow_does_not_see_is_an_error(
    count: Any, num_gpus: float, allow_mixed: bool
) -> None:
    workers = ray_fed.Workers(
        count=count, num_cpus=0.5, num_gpus=num_gpus, allow_mixed=allow_mixed
    )
    begun = time.monotonic()
    with ray_fed.create_context(ray_fed.Config(workers=workers)) as context:
        told: list[str] = []
        for _ in range(2):  # it stays one: no later call runs on a CPU in silence
            with pytest.raises(errors.ResourceError) as raised:
                context.invoke(total, [1, 2])
            told.append(str(raised.value))

    assert time.monotonic() - begun < workers.start_timeout_s
    node: str = ray.util.get_node_ip_address()
    for message in told:
        assert f"on node {node} was refused: Expected a GPU for TensorFlow" in message
        assert f"Ray gave {num_gpus:g} of GPU " in message
        assert "sees /physical_device:CPU:0" in message
        assert "set `workers.num_gpus` to 0" in message
