"""Attempts at a subround, on fake workers: whom they take, and what they note."""

# pyright: reportPrivateUsage=false

import asyncio
import concurrent.futures
import dataclasses
from typing import Any

import pytest

import ray_fed.errors as errors
from ray_fed.cluster import failures, object_store
from ray_fed.cluster.subround import Attempt, AttemptNotes, KnownWorker, Work
from ray_fed.plan.outcomes import Outcome
from tests.cluster.conftest import FakeHandle
from tests.cluster.test_subround import DATA, TERMS, doubled, subround_of


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Stands for Ray's key-value store."""
    stored: dict[bytes, bytes] = {}

    def call(self: Any, verb: str, key: bytes, *args: Any, **_: Any) -> Any:
        del self
        if verb == "put":
            stored[key] = args[0]
        elif verb == "del":
            stored.pop(key, None)
        return stored.get(key)

    def find_cause_of_silence(submitted: float) -> failures.Failure:
        del submitted
        return failures.Failure("crash", failures.GONE)

    monkeypatch.setattr(AttemptNotes, "_call", call)
    monkeypatch.setattr(failures, "find_cause_of_silence", find_cause_of_silence)
    return stored


def terms_of(handles: list[FakeHandle], num_own: int = 1, **settings: Any) -> Any:
    """Return terms on which every worker is known, as it is now."""
    workers = tuple(
        KnownWorker(f"worker {index}", handle._describe())
        for index, handle in enumerate(handles)
    )
    return dataclasses.replace(TERMS, workers=workers, num_own=num_own, **settings)


def run(
    handles: list[FakeHandle], number: int = 0, terms: Any = None
) -> tuple[Outcome, list[Any]]:
    """Run an attempt; return what came of it, and its values."""
    work = Work.of("a", terms or terms_of(handles), subround_of(doubled), DATA)
    outcome, values = asyncio.run(Attempt(handles, work, number).run())
    return outcome, [object_store.decode(value) for value in values]


def test_attempt_runs_on_its_own_worker(
    handles: list[FakeHandle], notes: dict[bytes, bytes]
) -> None:
    outcome, values = run(handles)

    assert values == [(12,)]
    assert (outcome.worker, outcome.attempts, outcome.lost) == ("worker 0", 1, ())
    assert [handle.calls for handle in handles] == [["evaluate"], [], []]
    assert not notes


def test_lost_worker_is_noted_and_the_next_attempt_takes_another(
    handles: list[FakeHandle], notes: dict[bytes, bytes]
) -> None:
    handles[0].dies_at = "evaluate"

    with pytest.raises(errors.WorkerLost, match="`worker 0` on node 10"):
        run(handles)
    outcome, values = run(handles, number=1)

    assert values == [(12,)]
    assert outcome.worker in {"worker 1", "worker 2"}
    assert outcome.attempts == 2
    ((number, worker, pid, ended),) = [
        (a.attempt, a.worker, a.worker_pid, a.ended) for a in outcome.lost
    ]
    assert (number, worker, pid, ended) == (1, "worker 0", 1, "crash")
    assert not notes


def test_workers_that_died_together_cost_one_attempt(handles: list[FakeHandle]) -> None:
    terms = terms_of(handles)
    handles[0].is_dead = handles[1].is_dead = True

    with pytest.raises(errors.WorkerLost, match="`worker 0`"):
        run(handles, terms=terms)
    outcome, _ = run(handles, number=1, terms=terms)

    assert outcome.worker == "worker 2"
    assert [attempt.worker for attempt in outcome.lost] == ["worker 0"]


def test_process_that_died_is_a_crash_of_its_own(handles: list[FakeHandle]) -> None:
    outcome, _ = run(handles, number=1)

    assert outcome.worker == "worker 0"
    assert [a.detail for a in outcome.lost] == ["the process that drove it is gone"]


def test_spent_budget_ends_the_subround(
    handles: list[FakeHandle], notes: dict[bytes, bytes]
) -> None:
    for handle in handles:
        handle.dies_at = "evaluate"

    with pytest.raises(errors.WorkerLost):
        run(handles)
    with pytest.raises(
        errors.RetryBudgetError, match="at most 1 failures of crash"
    ) as raised:
        run(handles, number=1)

    assert raised.value.failure_class == "crash"
    assert (raised.value.location.node, raised.value.location.attempt) == (
        "10.0.0.1",
        2,
    )
    assert not notes


def test_worker_that_is_new_is_passed_over(handles: list[FakeHandle]) -> None:
    handles[0]._actor._loading = concurrent.futures.Future()

    outcome, _ = run(handles)

    assert outcome.worker in {"worker 1", "worker 2"}
    assert (outcome.attempts, outcome.lost) == (1, ())


def test_first_worker_that_answers_is_taken_where_none_is_known(
    handles: list[FakeHandle],
) -> None:
    handles[0].is_dead = True
    unknown = tuple(KnownWorker(f"worker {index}", None) for index in range(3))

    outcome, _ = run(handles, terms=dataclasses.replace(TERMS, workers=unknown))

    assert outcome.worker in {"worker 1", "worker 2"}


def test_wait_for_an_answer_has_an_end(handles: list[FakeHandle]) -> None:
    for handle in handles:
        handle.is_dead = True
    unknown = tuple(KnownWorker(f"worker {index}", None) for index in range(3))
    terms = dataclasses.replace(TERMS, workers=unknown, wait_s=0.0)

    with pytest.raises(errors.ResourceError, match="a worker with 1 CPU"):
        run(handles, terms=terms)
