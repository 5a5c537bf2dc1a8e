"""What a first call tells of its wait: workers that start, then compiling."""

import asyncio
from collections.abc import Sequence
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.contexts.first_calls as first_calls
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.contexts.first_calls import Progress, StartupProgress
from ray_fed.observability import events
from tests.fixtures import Seen


@rtf.computation(np.float32)
def half(x: Any) -> Any:
    return x / 2


ROOM = "room for 2 workers: 2 CPU (0 of 2 free)"


class Recorder(Seen):
    """Tells what first calls waited for."""

    @property
    def activities(self) -> list[str]:
        return [e.activity for e in self if isinstance(e, events.Waiting)]


class Workers:
    """Workers that become ready one after another, as soon as somebody asks.

    Args:
        counts: what is told of them, the first at once.
    """

    def __init__(self, counts: Sequence[Progress]) -> None:
        self._counts = iter(counts)
        self.seen: list[Progress | None] = []

    async def await_ready(self, seen: Progress | None) -> Progress:
        self.seen.append(seen)
        for counts in self._counts:
            return counts
        raise errors.ClusterError("Expected the pool to answer, found it gone.")


async def wait(first: StartupProgress, seconds: float) -> None:
    async with first.telling(half):
        await asyncio.sleep(seconds)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_calls, "_PATIENCE_S", 0.0)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    ("counts", "told"),
    [
        pytest.param(
            [(0, 0, ""), (0, 2, ""), (1, 2, ""), (2, 2, "")],
            [
                "looking for room for workers",
                "starting 2 workers: TensorFlow",
                "1 of 2 workers ready",
                "tracing and compiling",
                "",
            ],
            id="one after another",
        ),
        pytest.param(
            [(0, 1, ""), (1, 1, "")],
            ["starting 1 worker: TensorFlow", "tracing and compiling", ""],
            id="one",
        ),
        pytest.param(
            [(0, 2, ROOM), (1, 2, "room for 1 worker"), (2, 2, "")],
            [
                f"waiting for {ROOM}",
                "1 of 2 workers ready, waiting for room for 1 worker",
                "tracing and compiling",
                "",
            ],
            id="no room",
        ),
        pytest.param([(2, 2, "")], ["tracing and compiling", ""], id="all ready"),
        pytest.param(
            [(0, 1, "")], ["starting 1 worker: TensorFlow", ""], id="pool gone"
        ),
    ],
)
def test_first_call_tells_what_it_waits_for(
    recorder: Recorder, counts: list[Progress], told: list[str]
) -> None:
    workers = Workers(counts)

    asyncio.run(wait(StartupProgress(recorder.on_event, workers.await_ready), 0.2))

    assert recorder.activities == told
    assert workers.seen[0] is None
    assert workers.seen[1:] == counts[: len(workers.seen) - 1]


def test_short_call_tells_nothing(recorder: Recorder) -> None:
    asyncio.run(wait(StartupProgress(recorder.on_event, None), 0.0))

    assert recorder.activities == []


@pytest.mark.usefixtures("_impatient")
def test_call_that_failed_is_followed_by_another_first_one(recorder: Recorder) -> None:
    first = StartupProgress(recorder.on_event, None)

    async def fail() -> None:
        async with first.telling(half):
            await asyncio.sleep(0.05)
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 (that very one)
        asyncio.run(fail())
    for _ in range(2):
        asyncio.run(wait(first, 0.05))

    # Of the one that failed and of the one after it; the third is no first one.
    assert recorder.activities == ["tracing and compiling", ""] * 2


@pytest.mark.usefixtures("_impatient")
def test_context_tells_of_the_first_call_alone(
    recorder: Recorder, local_contexts: Any
) -> None:
    context = local_contexts(kernels={"enabled": False})
    context.subscribe(recorder)

    @rtf.computation(np.float32)
    def slow(x: Any) -> Any:
        return x + tf.reduce_sum(tf.linalg.inv(tf.eye(700))) * 0

    @fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
    def total(values: Any) -> Any:
        return fl.federated_sum(fl.federated_map(slow, values))

    results = [context.invoke(total, [1.0, 2.0]) for _ in range(3)]

    assert results == [3.0] * 3
    assert recorder.activities == ["tracing and compiling", ""]


@pytest.mark.ray
@pytest.mark.slow
def test_first_call_on_ray_tells_of_workers(
    recorder: Recorder, ray_contexts: Any
) -> None:
    own_pool = ray_fed.Workers(count=1, client_bytes=2**27)
    context = ray_contexts(workers=own_pool)
    context.subscribe(recorder)

    @fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
    def total(values: Any) -> Any:
        return fl.federated_sum(fl.federated_map(half, values))

    result = context.invoke(total, [2.0, 4.0])

    assert result == 3.0
    assert "starting 1 worker: TensorFlow" in recorder.activities
    assert recorder.activities[-1] == ""
