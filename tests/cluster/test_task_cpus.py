"""CPUs for Ray's own tasks: what workers leave, and what becomes of work without."""

# pyright: reportPrivateUsage=false

import asyncio
import contextlib
import threading
from typing import Any

import pyarrow as pa
import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed.cluster import datasets, joining
from ray_fed.cluster.datasets import TaskCpus
from ray_fed.cluster.session import Session
from ray_fed.program import ClientData
from tests.fixtures import NUM_CPUS

_SPENT = TaskCpus(total=2, num_workers=2, num_left=0, may_grow=False)
_FREE = TaskCpus(total=2, num_workers=1, num_left=1, may_grow=False)
_GROWING = TaskCpus(total=2, num_workers=2, num_left=0, may_grow=True)

_ADVICE = r"found that 2 workers hold all 2 of the cluster: call ClientData\.from_ray"


def test_work_without_a_cpu_does_not_begin() -> None:
    begun: list[int] = []

    with pytest.raises(errors.ResourceError, match=_ADVICE):
        datasets.run_tasks(lambda: begun.append(1), "a test", lambda: _SPENT)

    assert not begun


def test_work_is_stopped_once_workers_take_all_cpus() -> None:
    found = iter([_FREE, _FREE, _SPENT])
    stopped = threading.Event()

    def wait() -> None:
        try:
            while not stopped.wait(0.01):
                pass
        finally:
            stopped.set()

    with pytest.raises(errors.ResourceError, match=_ADVICE):
        datasets.run_tasks(wait, "a test", lambda: next(found))

    assert stopped.wait(60)


def test_work_waits_for_a_cpu_where_more_may_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = iter([_GROWING, _GROWING, _FREE])

    result = datasets.run_tasks(lambda: 7, "a test", lambda: next(found))

    assert result == 7
    assert caplog.messages == [
        "a test waits for a CPU: workers hold all 2 of the cluster"
    ]


def test_wait_for_a_cpu_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_GROW_S", 0.1)

    with pytest.raises(errors.ResourceError, match=_ADVICE):
        datasets.run_tasks(lambda: 7, "a test", lambda: _GROWING)


def test_error_of_the_work_is_raised() -> None:
    def fail() -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        datasets.run_tasks(fail, "a test", lambda: _FREE)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dataset_is_refused_where_workers_hold_all_cpus(ray_cluster: Any) -> None:
    import ray.data

    dataset = ray.data.from_arrow(pa.table({"s": ["u", "v"], "d": [1.0, 2.0]}))
    workers = ray_fed.Workers(count=1, num_cpus=NUM_CPUS)

    with contextlib.closing(Session(None, ray_fed.Config(workers=workers))) as session:
        asyncio.run(session.count_workers())
        with pytest.raises(errors.ResourceError, match=f"hold all {NUM_CPUS}"):
            ClientData.from_ray(dataset, client="s", x="d")


def test_ray_is_started_by_calls_again_once_the_last_thread_is_done() -> None:
    runs = [threading.Event() for _ in range(2)]
    ends = [threading.Event() for _ in range(2)]
    seen: list[bool] = []

    def start(index: int) -> threading.Thread:
        def work() -> None:
            runs[index].set()
            ends[index].wait(60)

        def run() -> None:
            datasets.run_tasks(work, "work", lambda: TaskCpus(1, 0, 1, may_grow=False))

        thread = threading.Thread(target=run)
        thread.start()
        runs[index].wait(60)
        return thread

    threads = [start(index) for index in range(2)]
    for end, thread in zip(ends, threads, strict=True):
        seen.append(joining._HOOK.enable_auto_connect)
        end.set()
        thread.join(60)

    assert seen == [False, False]
    assert joining._HOOK.enable_auto_connect
