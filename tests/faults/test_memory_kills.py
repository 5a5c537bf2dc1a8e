"""Workers that end for want of memory, or find none: alone on a node."""

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import ray

import ray_fed
import ray_fed.errors as errors

import tensorflow as tf  # isort: skip

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]

HEADROOM = 0.2
"""Of the machine's memory, how much more may be used before Ray ends a worker."""


def _memory() -> tuple[int, int]:
    """Return the bytes of the machine, and those that are in use."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found["MemTotal"], found["MemTotal"] - found["MemAvailable"]


@pytest.fixture(scope="module")
def watched_ray() -> Iterator[None]:
    """A Ray of one node that ends workers soon after the memory in use grows."""
    assert not ray.is_initialized()
    total, used = _memory()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        _system_config={
            "memory_usage_threshold": used / total + HEADROOM,
            "memory_monitor_refresh_ms": 100,
            "idle_worker_killing_time_threshold_ms": 600_000,
        },
    )
    yield
    ray.shutdown()


def _eat_once(flag: pathlib.Path) -> Any:
    """Return work of client 3 that takes more memory than there is, the first time."""
    total, _ = _memory()
    num_numbers = int(2 * HEADROOM * total / 4)

    def body(client: Any) -> Any:
        # With the time in them: a graph may work constants out but once, and before.
        zero = tf.cast(tf.timestamp() < 0.0, tf.int32)
        pattern = tf.where(tf.equal(zero, 0), str(flag), "")
        ate = tf.size(tf.io.matching_files(pattern)) > 0
        eats = tf.logical_and(tf.equal(client, 3), ~ate)
        name = tf.where(eats, str(flag), str(flag) + "-others")
        with tf.control_dependencies([tf.io.write_file(name, "")]):
            size = tf.where(eats, tf.constant(num_numbers, tf.int64), 1)
        return client + tf.reduce_max(tf.fill([size], zero))

    return body


@pytest.mark.usefixtures("watched_ray")
def test_worker_that_is_killed_for_its_memory_costs_its_subround_only(
    client_work: Any, tmp_path: pathlib.Path
) -> None:
    flag = tmp_path / "ate"
    flag.touch()
    work = client_work(body=_eat_once(flag))
    expected = work.expected(1)
    flag.unlink()
    config = ray_fed.Config(seed=11, clients_per_leaf=2, workers=2, subrounds=4)

    with ray_fed.create_context(config, address="auto") as context:
        bits = [work.run(context)]
        report = context.last_report

    assert report is not None
    assert bits == expected
    assert report.retries == {"memory": 1}
    (attempt,) = report.subrounds[0].lost
    assert "memory" in attempt.detail
    assert work.runs() == [2] * 4 + [1] * 12


@pytest.mark.usefixtures("watched_ray")
def test_work_that_finds_no_memory_is_tried_again_within_its_budget(
    client_work: Any,
) -> None:
    def too_large(client: Any) -> Any:
        zero = tf.cast(tf.timestamp() < 0.0, tf.int32)
        size = tf.where(tf.equal(client, 5), tf.constant(2**50, tf.int64), 1)
        return client + tf.reduce_max(tf.fill([size], zero))

    work = client_work(body=too_large)
    config = ray_fed.Config(
        seed=11,
        clients_per_leaf=2,
        workers=1,
        subrounds=2,
        retry=ray_fed.Retry(memory=1),
    )

    with (
        ray_fed.create_context(config, address="auto") as context,
        pytest.raises(errors.RetryBudgetError, match="most 1 failures of memory") as e,
    ):
        work.run(context)

    assert e.value.failure_class == "memory"
    location = e.value.location
    assert (location.round_index, location.subround_index) == (0, 0)
    assert (location.client_index, location.attempt) == (5, 2)
    assert location.node is not None
    assert "ResourceExhaustedError" in e.value.cause_text
