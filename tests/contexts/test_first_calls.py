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
from ray_fed.contexts.first_calls import StartupProgress
from ray_fed.observability import events
from tests.fixtures import Seen


@rtf.computation(np.float32)
def half(x: Any) -> Any:
    return x / 2


ROOM = "waiting for room for 2 workers: 2 CPU (0 of 2 free)"
TRACING = "tracing and compiling"


class Recorder(Seen):
    """Tells what first calls waited for."""

    @property
    def activities(self) -> list[str]:
        return [e.activity for e in self if isinstance(e, events.Waiting)]


class Waits:
    """A pool that says what calls wait for, and then nothing more.

    Args:
        texts: What it says, one after another.
        error: What it raises after the last one, or None.
    """

    def __init__(self, texts: Sequence[str], error: Exception | None = None) -> None:
        self.texts = iter(texts)
        self._error = error
        self.told: list[str | None] = []

    async def await_change(self, told: str | None) -> str:
        self.told.append(told)
        for text in self.texts:
            return text
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()
        raise AssertionError


async def wait(first: StartupProgress, seconds: float) -> None:
    async with first.telling(half):
        await asyncio.sleep(seconds)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_calls, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(first_calls, "_LATER_PATIENCE_S", 0.0)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    ("texts", "first", "later"),
    [
        pytest.param(
            ["starting 2 workers: TensorFlow", "1 of 2 workers ready", ""],
            ["starting 2 workers: TensorFlow", "1 of 2 workers ready", TRACING, ""],
            ["starting 2 workers: TensorFlow", "1 of 2 workers ready", "", ""],
            id="workers that start",
        ),
        pytest.param([ROOM], [ROOM, ""], [ROOM, ""], id="no room"),
        pytest.param([""], [TRACING, ""], [], id="all ready"),
        pytest.param(
            ["", ROOM, ""], [TRACING, ROOM, TRACING, ""], [ROOM, "", ""], id="lost"
        ),
    ],
)
def test_call_tells_what_it_waits_for(
    recorder: Recorder, texts: list[str], first: list[str], later: list[str]
) -> None:
    waits = Waits(texts)
    startup = StartupProgress(recorder.on_event, waits.await_change)

    asyncio.run(wait(startup, 0.2))
    told_first = recorder.activities
    recorder.clear()
    waits.texts = iter(texts)
    asyncio.run(wait(startup, 0.2))

    assert told_first == first
    assert [a for a in recorder.activities if a] == [a for a in later if a]
    assert recorder.activities[-1:] == later[-1:]
    assert waits.told[: len(texts) + 1] == [None, *texts]


@pytest.mark.usefixtures("_impatient")
def test_error_of_the_pool_is_left_to_the_call(recorder: Recorder) -> None:
    waits = Waits([ROOM], errors.ClusterError("Expected the pool, found it gone."))

    asyncio.run(wait(StartupProgress(recorder.on_event, waits.await_change), 0.2))

    assert recorder.activities == [ROOM, ""]


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
