"""A worker that takes too much memory: Ray ends it, and who else it finds; alone."""

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import ray

import ray_fed

import tensorflow as tf  # isort: skip

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]

POOL_BYTES = 2 * 2**30
"""What a pool and its tasks may use, and more."""

HEADROOM = 0.2
"""Of the machine's memory, how much more may be used before Ray ends processes."""

MEAL = 0.4
"""Of the machine's memory, what the client takes; and keeps, were it not ended."""

MEAL_S = 60.0
HUNGRY = 13


def _memory() -> tuple[int, int]:
    """Return the bytes of the machine, and those that are in use."""
    lines = pathlib.Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return found["MemTotal"], found["MemTotal"] - found["MemAvailable"]


@pytest.fixture
def watched_ray() -> Iterator[None]:
    """A Ray of one node that ends processes soon after the memory in use grows."""
    assert not ray.is_initialized()
    total, used = _memory()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        _system_config={
            "memory_usage_threshold": (used + POOL_BYTES) / total + HEADROOM,
            "memory_monitor_refresh_ms": 100,
            "idle_worker_killing_time_threshold_ms": 600_000,
        },
    )
    yield
    ray.shutdown()


def _eat_once(flag: pathlib.Path) -> Any:
    """Return work of one client that takes too much memory, the first time."""
    num_numbers = int(MEAL * _memory()[0] / 4)

    def body(client: Any) -> Any:
        # With the time in them: a graph may work constants out but once, and before.
        began = tf.timestamp()
        zero = tf.cast(began < 0.0, tf.int32)
        pattern = tf.where(tf.equal(zero, 0), str(flag), "")
        ate = tf.size(tf.io.matching_files(pattern)) > 0
        eats = tf.logical_and(tf.equal(client, HUNGRY), ~ate)
        name = tf.where(eats, str(flag), str(flag) + "-others")
        with tf.control_dependencies([tf.io.write_file(name, "")]):
            size = tf.where(eats, tf.constant(num_numbers, tf.int64), 1)
        meal = tf.fill([size], zero)
        with tf.control_dependencies([meal]):
            first = meal[0]

        def is_full(turn: Any) -> Any:
            del turn
            return tf.logical_and(eats, tf.timestamp() < began + MEAL_S)

        def count(turn: Any) -> Any:
            return [turn + 1]

        turns = tf.while_loop(is_full, count, [first])[0]
        with tf.control_dependencies([turns]):
            return client + tf.reduce_max(meal)

    return body


@pytest.mark.usefixtures("watched_ray")
def test_worker_that_is_killed_for_its_memory_costs_no_bit(
    client_work: Any, tmp_path: pathlib.Path
) -> None:
    flag = tmp_path / "ate"
    flag.touch()
    work = client_work(body=_eat_once(flag))
    expected = work.expected(1)
    flag.unlink()
    config = ray_fed.Config(
        seed=11,
        clients_per_leaf=2,
        workers=2,
        subrounds=8,
        retry=ray_fed.Retry(crash=10, memory=3),
        stragglers={"enabled": False},
    )

    with ray_fed.create_context(config, address="auto") as context:
        bits = [work.run(context)]
        report = context.last_report

    assert flag.exists()
    assert bits == expected
    assert report is not None
    assert report.retries["memory"] >= 1
    assert "memory" in report.subrounds[HUNGRY // 2].lost[0].detail
    assert work.runs()[HUNGRY] == 2
    assert work.runs()[:8] == [1] * 8  # of subrounds that were done by then
