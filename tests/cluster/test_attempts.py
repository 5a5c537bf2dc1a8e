"""Attempts at a subround, on fake workers: whom they take, and what they count."""

# pyright: reportPrivateUsage=false

import asyncio
import concurrent.futures
import dataclasses
from typing import Any

import pytest

import ray_fed.errors as errors
from ray_fed.cluster import failures, object_store, ray_strategy, subround
from ray_fed.cluster.subround import Attempts, Work
from ray_fed.plan.outcomes import Outcome
from tests.cluster.conftest import FakeHandle
from tests.cluster.test_subround import (
    DATA,
    SEVEN,
    TERMS,
    doubled,
    in_chunks,
    subround_of,
)


@pytest.fixture(autouse=True)
def _causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows why a process ended; one that is to be killed is dead."""

    def find_cause_of_silence(submitted: float) -> failures.Failure:
        del submitted
        return failures.Failure("crash", "the process that drove it is gone")

    def kill(handle: FakeHandle, *, no_restart: bool) -> None:
        assert not no_restart
        handle.is_dead = True

    monkeypatch.setattr(failures, "find_cause_of_silence", find_cause_of_silence)
    monkeypatch.setattr(ray_strategy.ray, "kill", kill)


def terms_of(handles: list[FakeHandle], **settings: Any) -> Any:
    """Return terms on which every worker is known, as it is now."""
    workers = tuple(
        (f"worker {index}", handle._describe()) for index, handle in enumerate(handles)
    )
    return dataclasses.replace(TERMS, workers=workers, **settings)


UNKNOWN = tuple((f"worker {index}", None) for index in range(3))


def run(
    handles: list[FakeHandle], number: int = 0, terms: Any = None, plan: Any = None
) -> tuple[Outcome, list[Any]]:
    """Run a subround; return what came of it, and its values."""
    about = plan or subround_of(doubled), SEVEN if plan else DATA
    work = Work.of("a", terms or terms_of(handles), *about)
    outcome, values = asyncio.run(Attempts(handles, work, number).run())
    return outcome, [object_store.decode(value) for value in values]


def test_subround_runs_on_its_own_worker(handles: list[FakeHandle]) -> None:
    outcome, values = run(handles)

    assert values == [(12,)]
    assert (outcome.worker, outcome.attempts, outcome.lost) == ("worker 0", 1, ())
    assert [handle.calls for handle in handles] == [["evaluate"], [], []]


def test_work_of_a_lost_worker_runs_on_another(handles: list[FakeHandle]) -> None:
    handles[0].dies_at = "evaluate"

    outcome, values = run(handles)

    assert values == [(12,)]
    assert outcome.worker in {"worker 1", "worker 2"}
    assert outcome.attempts == 2
    (lost,) = outcome.lost
    assert (lost.attempt, lost.worker, lost.worker_pid) == (1, "worker 0", 1)
    assert lost.ended == "crash"
    assert "`worker 0` on node 10" in lost.detail


def test_no_work_waits_for_a_lost_worker_while_another_one_answers(
    handles: list[FakeHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Restarting:
        async def remote(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(subround, "_ANSWER_S", None)
    monkeypatch.setattr(handles[0], "describe", Restarting(), raising=False)
    handles[0].dies_at = "evaluate"

    outcome, _ = run(handles)

    assert outcome.worker in {"worker 1", "worker 2"}


def test_only_the_part_of_a_lost_worker_runs_again(handles: list[FakeHandle]) -> None:
    plan = in_chunks(doubled, range(2), range(2, 4))
    _, expected = run(handles, plan=plan)
    for handle in handles:
        handle.calls.clear()
    handles[1].dies_at = "evaluate"

    outcome, values = run(handles, terms=terms_of(handles, num_own=2), plan=plan)

    assert values == expected
    assert [attempt.worker for attempt in outcome.lost] == ["worker 1"]
    assert sum(handle.calls.count("evaluate") for handle in handles) == 2


def test_workers_that_died_together_cost_one_attempt(handles: list[FakeHandle]) -> None:
    terms = terms_of(handles)
    handles[0].is_dead = handles[1].is_dead = True

    outcome, _ = run(handles, terms=terms)

    assert outcome.worker == "worker 2"
    assert [attempt.worker for attempt in outcome.lost] == ["worker 0"]


def test_task_that_died_is_a_crash_of_its_own(handles: list[FakeHandle]) -> None:
    outcome, _ = run(handles, number=1)

    assert outcome.worker == "worker 0"
    assert [a.detail for a in outcome.lost] == ["the process that drove it is gone"]
    assert "end_before" in handles[0].calls


def test_tasks_that_died_spend_the_budget(handles: list[FakeHandle]) -> None:
    with pytest.raises(errors.RetryBudgetError, match="found 2"):
        run(handles, number=2)


def test_spent_budget_ends_the_subround(handles: list[FakeHandle]) -> None:
    for handle in handles:
        handle.dies_at = "evaluate"

    with pytest.raises(
        errors.RetryBudgetError, match="at most 1 failures of crash"
    ) as raised:
        run(handles)

    location = raised.value.location
    assert raised.value.failure_class == "crash"
    assert (location.node, location.attempt) == ("10.0.0.1", 2)


def test_each_class_has_its_own_budget(handles: list[FakeHandle]) -> None:
    handles[0].raises = errors.WorkerMemoryError(
        "full", errors.Location(client_index=3), "frames"
    )
    for handle in handles[1:]:
        handle.dies_at = "evaluate"
    terms = terms_of(handles, budgets={"crash": 0, "memory": 1})

    with pytest.raises(errors.RetryBudgetError, match="most 0 failures of crash"):
        run(handles, terms=terms)
    handles[0].is_dead = False
    with pytest.raises(errors.RetryBudgetError, match=r"of memory.*full") as raised:
        run(handles, terms=dataclasses.replace(terms, budgets={"memory": 0}))

    assert raised.value.location.client_index == 3
    assert raised.value.cause_text == "frames"


def test_error_of_the_computation_is_not_tried_again(handles: list[FakeHandle]) -> None:
    handles[0].raises = errors.ComputationError("mend it")

    with pytest.raises(errors.ComputationError, match="mend it") as raised:
        run(handles, number=1)

    assert raised.value.location.attempt == 2
    assert all("evaluate" not in handle.calls for handle in handles)


def test_worker_that_hangs_is_killed_and_another_one_takes_its_work(
    handles: list[FakeHandle],
) -> None:
    handles[0].hangs = True
    terms = terms_of(handles, timeout_s=0.1, budgets={"hang": 1})

    outcome, values = run(handles, terms=terms)

    assert values == [(12,)]
    assert [attempt.ended for attempt in outcome.lost] == ["hang"]
    assert handles[0].is_dead


def test_worker_that_is_new_is_passed_over(handles: list[FakeHandle]) -> None:
    handles[0]._actor._loading = concurrent.futures.Future()

    outcome, _ = run(handles)

    assert outcome.worker in {"worker 1", "worker 2"}
    assert (outcome.attempts, outcome.lost) == (1, ())


def test_first_worker_that_answers_is_taken_where_none_is_known(
    handles: list[FakeHandle],
) -> None:
    handles[0].is_dead = True

    outcome, _ = run(handles, terms=dataclasses.replace(TERMS, workers=UNKNOWN))

    assert outcome.worker in {"worker 1", "worker 2"}


def test_wait_for_an_answer_has_an_end(handles: list[FakeHandle]) -> None:
    for handle in handles:
        handle.is_dead = True
    terms = dataclasses.replace(TERMS, workers=UNKNOWN, wait_s=0.0)

    with pytest.raises(errors.ResourceError, match="a worker with 1 CPU"):
        run(handles, terms=terms)
