"""Decisions of the pool, on a clock that the test turns."""

import dataclasses
import math

import pytest

from ray_fed.cluster.pool.actions import (
    Action,
    FailureClass,
    Grant,
    Refuse,
    Size,
    Start,
    Stop,
)
from ray_fed.cluster.pool.decisions import Pool
from ray_fed.cluster.pool.placement import Node
from ray_fed.cluster.pool.starts import MAX_FAILED_STARTS, START_PAUSE_S
from ray_fed.cluster.pool.stragglers import Stragglers

START_TIMEOUT_S = 10.0
BUDGETS: dict[str, int] = {"crash": 2, "preemption": 4, "memory": 0, "hang": 1}


WAIT_TIMEOUT_S = 100.0
NODE = Node("a", "10.0.0.1", free=8, total=8)


def _pool(count: int, stragglers: Stragglers | None = None) -> Pool:
    """A pool of fixed size on one node, with room for more."""
    size = Size(1, count, is_fixed=True, each="1 CPU", wait_timeout_s=WAIT_TIMEOUT_S)
    pool = Pool(size, BUDGETS, START_TIMEOUT_S, stragglers)
    pool.survey([NODE])
    return pool


def _started(count: int) -> Pool:
    """A pool whose workers are all idle."""
    pool = _pool(count)
    for action in pool.decide(0.0):
        assert isinstance(action, Start)
        pool.ready(action.worker, "a")
    return pool


def _lease(pool: Pool, subround: str, now_s: float = 0.0) -> Grant:
    """Lease a worker, replacing lost ones first."""
    pool.ask(subround)
    for action in pool.decide(now_s):
        match action:
            case Start():
                pool.ready(action.worker, "a")
            case Grant():
                return action
            case _:
                raise AssertionError(action)
    (grant,) = pool.decide(now_s)
    assert isinstance(grant, Grant)
    return grant


def _refusals(actions: list[Action]) -> list[Refuse]:
    return [action for action in actions if isinstance(action, Refuse)]


def test_first_decision_starts_every_worker() -> None:
    pool = _pool(2)

    assert pool.decide(0.0) == [Start("worker 0", "a"), Start("worker 1", "a")]
    assert pool.num_ready == 0


@pytest.mark.parametrize(
    ("free", "now_s", "expected"),
    [
        pytest.param(2, 1.0, 0, id="room"),
        pytest.param(1, 1.0, 1, id="room for one"),
        pytest.param(2, 31.0, 2, id="room that another one took"),
    ],
)
def test_workers_wait_for_room_until_they_are_placed(
    free: int, now_s: float, expected: int
) -> None:
    pool = _pool(2)
    pool.survey([dataclasses.replace(NODE, free=free)])
    pool.decide(0.0)
    waiting = pool.num_unplaced(now_s)
    for index in range(2):
        pool.placed(f"worker {index}")

    assert waiting == expected
    assert pool.num_unplaced(now_s) == 0


@pytest.mark.parametrize(
    ("prefers", "expected"),
    [("worker 1", "worker 1"), ("worker 7", "worker 0"), ("", "worker 0")],
    ids=["idle", "gone", "none"],
)
def test_grants_the_worker_that_is_preferred(prefers: str, expected: str) -> None:
    pool = _started(2)
    tickets = [pool.ask("x", prefers=prefers), pool.ask("y", prefers=prefers)]

    granted = [action for action in pool.decide(0.0) if isinstance(action, Grant)]

    assert [grant.ticket for grant in granted] == tickets
    assert granted[0].worker == expected
    assert {grant.worker for grant in granted} == {"worker 0", "worker 1"}


def test_decision_is_taken_once() -> None:
    pool = _pool(2)
    pool.decide(0.0)

    assert pool.decide(0.0) == []


def test_no_ticket_is_granted_before_a_worker_is_ready() -> None:
    pool = _pool(1)
    pool.ask("a")

    assert pool.decide(0.0) == [Start("worker 0", "a")]
    assert pool.decide(1.0) == []


def test_worker_that_gets_ready_is_granted() -> None:
    pool = _pool(1)
    ticket = pool.ask("a")
    pool.decide(0.0)

    pool.ready("worker 0", "a")

    assert pool.decide(1.0) == [Grant(ticket, "worker 0", attempt=1)]


def test_tickets_are_granted_in_the_order_they_were_asked() -> None:
    pool = _started(2)
    tickets = [pool.ask(subround) for subround in "cab"]

    assert pool.decide(0.0) == [
        Grant(tickets[0], "worker 0", attempt=1),
        Grant(tickets[1], "worker 1", attempt=1),
    ]


def test_worker_given_back_goes_to_who_waits_longest() -> None:
    pool = _started(1)
    _, first, _ = (pool.ask(subround) for subround in "abc")
    pool.decide(0.0)

    pool.give_back("worker 0")

    assert pool.decide(1.0) == [Grant(first, "worker 0", attempt=1)]


def test_leased_worker_is_nobody_elses() -> None:
    pool = _started(1)
    _lease(pool, "a")
    pool.ask("b")

    assert pool.decide(1.0) == []


def test_second_answer_of_a_leased_worker_does_not_free_it() -> None:
    pool = _started(1)
    _lease(pool, "a")
    pool.ask("b")

    pool.ready("worker 0", "a")

    assert pool.decide(1.0) == []


def test_idle_workers_are_leased_at_once() -> None:
    pool = _started(3)
    first = _lease(pool, "a").worker

    further = pool.lease_idle("a", 5, math.inf)

    assert sorted([first, *further]) == ["worker 0", "worker 1", "worker 2"]
    assert pool.lease_idle("a", 5, math.inf) == []


def test_idle_workers_are_left_to_who_waits() -> None:
    pool = _pool(2)
    pool.decide(0.0)
    pool.ask("b")
    pool.ready("worker 0", "a")

    assert pool.lease_idle("a", 1, math.inf) == []


def test_further_worker_that_hangs_counts_against_its_subround() -> None:
    pool = _started(2)
    _lease(pool, "a")
    (further,) = pool.lease_idle("a", 1, 7.0)

    actions = pool.decide(7.0)

    assert [a.worker for a in actions if isinstance(a, Stop)] == [further]
    for _ in range(BUDGETS["hang"]):
        pool.failed("a", "hang", "again")
    pool.ask("a")
    assert len(_refusals(pool.decide(7.0))) == 1


def test_withdrawn_ticket_is_not_granted() -> None:
    pool = _started(1)
    withdrawn, kept = pool.ask("a"), pool.ask("b")

    pool.withdraw(withdrawn)

    assert pool.decide(0.0) == [Grant(kept, "worker 0", attempt=1)]


def test_withdrawing_an_unknown_ticket_is_ignored() -> None:
    pool = _started(1)

    pool.withdraw(17)

    assert pool.decide(0.0) == []


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param("worker 9", id="unknown"),
        pytest.param("worker 1", id="idle"),
    ],
)
def test_giving_back_what_is_not_leased_is_ignored(worker: str) -> None:
    pool = _started(2)
    _lease(pool, "a")

    pool.give_back(worker)

    assert pool.num_ready == 2
    assert pool.decide(0.0) == []


def test_giving_back_a_worker_that_starts_does_not_make_it_ready() -> None:
    pool = _pool(1)
    pool.decide(0.0)
    pool.ask("a")

    pool.give_back("worker 0")

    assert pool.decide(0.0) == []


def test_giving_back_a_lost_worker_is_ignored() -> None:
    pool = _started(1)
    grant = _lease(pool, "a")
    pool.lost(grant.worker, "crash", "it died")

    pool.give_back(grant.worker)

    assert pool.num_ready == 0


@pytest.mark.parametrize("leased", [True, False], ids=["leased", "idle"])
def test_lost_worker_is_replaced_under_a_new_name(leased: bool) -> None:
    pool = _started(1)
    if leased:
        _lease(pool, "a")

    pool.lost("worker 0", "crash", "it died")

    assert pool.decide(1.0) == [Start("worker 1", "a")]


def test_lost_worker_costs_nobody_else_a_worker() -> None:
    pool = _started(2)
    lost, kept = _lease(pool, "a"), _lease(pool, "b")

    pool.lost(lost.worker, "crash", "it died")
    pool.give_back(kept.worker)

    ticket = pool.ask("b")
    assert pool.decide(1.0) == [
        Start("worker 2", "a"),
        Grant(ticket, kept.worker, attempt=2),
    ]


def test_attempt_counts_the_leases_of_a_subround() -> None:
    pool = _started(1)

    attempts: list[int] = []
    for _ in range(3):
        grant = _lease(pool, "a")
        attempts.append(grant.attempt)
        pool.lost(grant.worker, "preemption", "it was taken")

    assert attempts == [1, 2, 3]
    assert _lease(pool, "b").attempt == 1


@pytest.mark.parametrize(
    ("failure_class", "budget"),
    [
        pytest.param("crash", 2, id="crash"),
        pytest.param("preemption", 4, id="preemption"),
        pytest.param("memory", 0, id="memory"),
    ],
)
def test_subround_is_refused_past_the_budget_of_the_class(
    failure_class: FailureClass, budget: int
) -> None:
    pool = _started(1)
    for _ in range(budget + 1):
        grant = _lease(pool, "a")
        pool.lost(grant.worker, failure_class, "`worker` on node 10.0.0.1: gone")

    ticket = pool.ask("a")

    assert _refusals(pool.decide(0.0)) == [
        Refuse(
            ticket,
            f"Expected at most {budget} failures of {failure_class} in one subround"
            f" (`retry.{failure_class}`), found {budget + 1}. The last: `worker` on"
            " node 10.0.0.1: gone",
            failure_class,
        )
    ]


def test_budgets_of_classes_are_apart() -> None:
    pool = _started(1)
    losses: list[FailureClass] = ["crash", "preemption", "crash", "preemption"]
    for failure_class in losses:
        pool.lost(_lease(pool, "a").worker, failure_class, "it died")

    assert _lease(pool, "a").attempt == 5


def test_budgets_of_subrounds_are_apart() -> None:
    pool = _started(1)
    for subround in "aabb":
        pool.lost(_lease(pool, subround).worker, "crash", "it died")

    assert _lease(pool, "a").attempt == 3
    assert pool.num_ready == 1


def test_refused_subround_leaves_the_pool_to_others() -> None:
    pool = _started(1)
    pool.lost(_lease(pool, "a").worker, "memory", "it ate too much")
    pool.ask("a")
    pool.decide(0.0)

    pool.ready("worker 1", "a")

    assert _lease(pool, "b").worker == "worker 1"


def test_loss_reported_twice_counts_once() -> None:
    pool = _started(1)
    for _ in range(2):
        worker = _lease(pool, "a").worker
        for _ in range(2):  # its subround says so, and so does its own watcher
            pool.lost(worker, "crash", "it died")

    assert _lease(pool, "a").attempt == 3


def test_loss_of_an_idle_worker_is_on_nobodys_budget() -> None:
    pool = _started(1)
    for _ in range(3):
        worker = _lease(pool, "a").worker
        pool.give_back(worker)
        pool.lost(worker, "memory", "it died")

    assert _lease(pool, "a").attempt == 4


def test_loss_of_an_unknown_worker_is_ignored() -> None:
    pool = _started(1)

    pool.lost("worker 9", "crash", "it died")

    assert pool.num_ready == 1
    assert pool.decide(0.0) == []


def test_forgotten_subround_starts_afresh() -> None:
    pool = _started(1)
    for _ in range(3):
        pool.lost(_lease(pool, "a").worker, "crash", "it died")

    pool.forget("a")

    assert _lease(pool, "a").attempt == 1


def test_forgetting_an_unknown_subround_is_ignored() -> None:
    pool = _started(1)

    pool.forget("never seen")

    assert _lease(pool, "a").attempt == 1


def test_next_deadline_is_that_of_the_oldest_start() -> None:
    pool = _pool(2)
    pool.decide(5.0)
    pool.ready("worker 0", "a")
    pool.lost("worker 0", "crash", "it died")
    pool.decide(8.0)

    assert pool.next_deadline_s() == 5.0 + START_TIMEOUT_S


def test_no_start_has_no_deadline() -> None:
    assert _started(2).next_deadline_s() is None


def test_worker_is_not_stopped_before_its_deadline() -> None:
    pool = _pool(1)
    pool.decide(0.0)

    assert pool.decide(START_TIMEOUT_S - 0.1) == []


def test_worker_that_does_not_start_in_time_is_stopped_and_replaced() -> None:
    pool = _pool(1)
    pool.decide(0.0)

    stop, start = pool.decide(START_TIMEOUT_S)
    assert isinstance(stop, Stop)
    assert (stop.worker, start) == ("worker 0", Start("worker 1", "a"))
    assert pool.next_deadline_s() == 2 * START_TIMEOUT_S


def test_answer_after_the_deadline_is_ignored() -> None:
    pool = _pool(1)
    pool.decide(0.0)
    pool.decide(START_TIMEOUT_S)

    pool.ready("worker 0", "a")

    assert pool.num_ready == 0


def _fail_starts(pool: Pool, count: int, now_s: float = 0.0) -> None:
    for _ in range(count):
        starts = [a for a in pool.decide(now_s) if isinstance(a, Start)]
        for start in starts:
            pool.lost(start.worker, "crash", "no such device")


def test_failed_start_is_tried_again() -> None:
    pool = _pool(1)
    pool.ask("a")
    _fail_starts(pool, MAX_FAILED_STARTS - 1)

    assert pool.decide(0.0) == [Start("worker 2", "a")]


def test_failed_starts_in_a_row_refuse_everyone_who_waits() -> None:
    pool = _pool(1)
    tickets = [pool.ask("a"), pool.ask("b")]

    _fail_starts(pool, MAX_FAILED_STARTS)

    message = "Expected workers to start, found 3 failures. The last: no such device"
    assert pool.decide(0.0) == [Refuse(ticket, message, "fatal") for ticket in tickets]


def test_starts_that_time_out_say_what_may_be_wrong() -> None:
    pool = _pool(1)
    pool.ask("a")

    actions = [
        action
        for turn in range(MAX_FAILED_STARTS + 1)
        for action in pool.decide(turn * START_TIMEOUT_S)
    ]

    (refusal,) = _refusals(actions)
    assert "not ready within 10 s (`workers.start_timeout_s`)" in refusal.message
    assert "is the cluster short of what `workers` asks for?" in refusal.message


def test_workers_are_started_again_for_who_asks_after_a_refusal() -> None:
    pool = _pool(1)
    pool.ask("a")
    _fail_starts(pool, MAX_FAILED_STARTS)
    pool.decide(0.0)

    grant = _lease(pool, "a")

    assert grant.attempt == 1


def test_worker_that_starts_clears_the_failures_before_it() -> None:
    pool = _pool(1)
    _fail_starts(pool, MAX_FAILED_STARTS - 1)
    (start,) = pool.decide(0.0)
    assert isinstance(start, Start)
    pool.ready(start.worker, "a")
    pool.lost(start.worker, "crash", "it died")
    pool.ask("a")

    _fail_starts(pool, MAX_FAILED_STARTS - 1)

    assert _refusals(pool.decide(0.0)) == []


def test_ready_worker_serves_on_while_others_fail_to_start() -> None:
    pool = _pool(2)
    pool.decide(0.0)
    pool.ready("worker 0", "a")
    pool.lost("worker 1", "crash", "no such device")
    _fail_starts(pool, MAX_FAILED_STARTS)

    assert _lease(pool, "a").worker == "worker 0"
    assert _refusals(pool.decide(0.0)) == []


def test_failed_starts_are_on_no_subrounds_budget() -> None:
    pool = _pool(1)
    pool.ask("a")
    _fail_starts(pool, MAX_FAILED_STARTS)
    pool.decide(0.0)

    assert _lease(pool, "a").attempt == 1


def test_starts_are_tried_again_after_a_pause_while_others_work() -> None:
    pool = _pool(2)
    first, second = (a.worker for a in pool.decide(0.0) if isinstance(a, Start))
    pool.ready(first, "a")
    failed = second
    for _ in range(MAX_FAILED_STARTS):
        pool.lost(failed, "crash", "no memory")
        started = [a for a in pool.decide(1.0) if isinstance(a, Start)]
        failed = started[0].worker if started else ""

    paused = pool.decide(2.0)

    assert paused == []
    assert pool.next_deadline_s() == 1.0 + START_PAUSE_S
    assert [type(a) for a in pool.decide(1.0 + START_PAUSE_S)] == [Start]


def _hang(pool: Pool, subround: str, timeout_s: float, now_s: float) -> list[Action]:
    """Lease a worker that does not come back; return what is decided of it."""
    pool.ask(subround, timeout_s)
    for action in pool.decide(now_s):
        if isinstance(action, Start):
            pool.ready(action.worker, "a")
            pool.decide(now_s)
    return pool.decide(now_s + timeout_s)


def test_worker_that_keeps_its_subround_too_long_is_ended_and_replaced() -> None:
    pool = _started(1)

    stop, start = _hang(pool, "a", 5.0, now_s=0.0)

    assert isinstance(stop, Stop)
    assert stop.worker == "worker 0"
    assert "`subrounds.timeout_s`" in stop.detail
    assert start == Start("worker 1", "a")


def test_time_of_a_subround_counts_from_its_lease() -> None:
    pool = _started(1)
    grant = _lease(pool, "a")
    pool.ask("b", 5.0)
    pool.decide(0.0)
    pool.give_back(grant.worker)

    pool.decide(100.0)

    assert pool.decide(104.9) == []
    assert pool.next_deadline_s() == 105.0
    assert [type(action) for action in pool.decide(105.0)] == [Stop, Start]


def test_worker_that_came_back_in_time_is_not_ended() -> None:
    pool = _started(1)
    pool.ask("a", 5.0)
    (grant,) = pool.decide(0.0)
    assert isinstance(grant, Grant)

    pool.give_back(grant.worker)

    assert pool.decide(6.0) == []
    assert pool.next_deadline_s() is None


def test_lease_without_a_time_is_never_ended() -> None:
    pool = _started(1)
    _lease(pool, "a")

    assert pool.decide(1e9) == []


def test_subround_that_hangs_too_often_is_refused() -> None:
    pool = _started(1)
    _hang(pool, "a", 5.0, now_s=0.0)
    pool.ready("worker 1", "a")
    _hang(pool, "a", 5.0, now_s=10.0)

    ticket = pool.ask("a", 5.0)

    (refusal,) = _refusals(pool.decide(20.0))
    assert (refusal.ticket, refusal.failure_class) == (ticket, "hang")
    assert "most 1 failures of hang" in refusal.message


def test_abandoned_worker_is_nobodys_until_it_is_given_back() -> None:
    pool = _started(1)
    grant = _lease(pool, "a")
    ticket = pool.ask("b")

    pool.abandon(grant.worker, 30.0)

    assert pool.decide(1.0) == []
    pool.give_back(grant.worker)
    assert pool.decide(2.0) == [Grant(ticket, grant.worker, attempt=1)]


def test_abandoned_worker_that_does_not_come_back_is_ended_at_nobodys_cost() -> None:
    pool = _started(1)
    grant = _lease(pool, "a")
    pool.abandon(grant.worker, 30.0)

    assert [type(action) for action in pool.decide(30.0)] == [Stop, Start]
    pool.ready("worker 1", "a")
    assert _lease(pool, "a", 31.0).attempt == 2
    assert pool.next_deadline_s() is None


def test_failure_of_a_subround_without_a_worker_counts() -> None:
    pool = _started(1)
    for _ in range(3):
        pool.failed("a", "crash", "its process is gone")

    pool.ask("a")

    (refusal,) = _refusals(pool.decide(0.0))
    assert "found 3. The last: its process is gone" in refusal.message


def _straggling() -> Pool:
    """Two workers; `a` was done after 2 s, and `b` has run since 0 s."""
    pool = _pool(2, Stragglers(3.0, 1.0))
    for action in pool.decide(0.0):
        assert isinstance(action, Start)
        pool.ready(action.worker, "a")
    pool.ask("a", siblings="round 1")
    pool.ask("b", siblings="round 1")
    pool.decide(0.0)
    pool.finish("a", 2.0)
    pool.give_back("worker 0")
    return pool


def test_straggler_is_given_the_idle_worker_when_it_is_due() -> None:
    pool = _straggling()
    ticket = pool.ask_spare("b")

    assert pool.decide(2.0) == []
    assert pool.next_deadline_s() == 6.0
    assert pool.decide(6.0) == [Grant(ticket, "worker 0", attempt=1)]
    assert pool.next_deadline_s() is None


def test_straggler_is_given_no_worker_that_another_subround_wants() -> None:
    pool = _straggling()
    pool.ask_spare("b")
    ticket = pool.ask("c")

    assert pool.decide(6.0) == [Grant(ticket, "worker 0", attempt=1)]
    assert pool.decide(7.0) == []
    assert pool.next_deadline_s() is None


def test_second_worker_that_is_lost_is_on_nobodys_budget() -> None:
    pool = _straggling()
    pool.ask_spare("b")
    pool.decide(6.0)

    pool.lost("worker 0", "memory", "it died")
    pool.ask("b")

    assert _refusals(pool.decide(7.0)) == []


def test_second_worker_that_is_not_wanted_any_more_is_not_given() -> None:
    pool = _straggling()
    pool.withdraw(pool.ask_spare("b"))

    assert pool.decide(6.0) == []


def test_straggler_is_compared_with_uses_of_kept_leases() -> None:
    pool = _straggling()
    first, second = "worker 0", "worker 1"
    pool.ask("a", siblings="round 1")
    pool.decide(2.0)

    for worker, since_s in ((first, 20.0), (second, 21.0)):
        pool.end_use(worker, since_s - 1.0)
        pool.begin_use(worker, since_s, math.inf, "round 2")
    pool.end_use(first, 22.0)
    pool.give_back(first)
    ticket = pool.ask_spare("b")

    assert pool.decide(23.0) == []
    assert pool.next_deadline_s() == 27.0
    assert pool.decide(27.0) == [Grant(ticket, first, attempt=1)]
