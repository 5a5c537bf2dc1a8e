"""How a pool follows the nodes of a cluster: decisions, on a clock the test turns."""

import pytest

from ray_fed.cluster.pool.actions import (
    SHORTAGE,
    Action,
    FailureClass,
    Grant,
    Look,
    Refuse,
    Request,
    Size,
    Start,
    Stop,
)
from ray_fed.cluster.pool.decisions import Pool
from ray_fed.cluster.pool.placement import Node
from ray_fed.cluster.pool.shortage import LOOK_S

BUDGETS: dict[str, int] = {"crash": 0, "preemption": 1, "memory": 0, "hang": 0}
WAIT_TIMEOUT_S = 30.0


def _pool(least: int, most: int, *nodes: Node, is_fixed: bool = False) -> Pool:
    size = Size(least, most, is_fixed, "1 CPU", WAIT_TIMEOUT_S)
    pool = Pool(size, BUDGETS, start_timeout_s=60.0)
    pool.survey(nodes)
    return pool


def _node(name: str, free: int, total: int | None = None, **fields: bool) -> Node:
    address = f"10.0.0.{ord(name) - ord('a') + 1}"
    return Node(name, address, free, free if total is None else total, **fields)


def _started(pool: Pool, now_s: float = 0.0) -> list[Start]:
    """Let the pool start what it wants, and let all of it get ready."""
    starts = [a for a in pool.decide(now_s) if isinstance(a, Start)]
    for start in starts:
        pool.ready(start.worker, start.node or "a")
    return starts


def _of(kind: type[Action], actions: list[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_nothing_is_started_before_the_nodes_are_known() -> None:
    pool = _pool(1, 2)

    assert pool.decide(0.0) == []


def test_pool_grows_to_the_room_there_is() -> None:
    pool = _pool(1, 8, _node("a", 2), _node("b", 1))

    assert [a.node for a in _started(pool)] == ["a", "b", "a"]
    assert pool.num_workers == 3


def test_pool_grows_to_no_more_than_its_most() -> None:
    pool = _pool(1, 2, _node("a", 8))

    assert len(_started(pool)) == 2


def test_worker_is_started_on_a_node_that_came() -> None:
    pool = _pool(1, 4, _node("a", 1))
    _started(pool)

    pool.survey([_node("a", 0, 1), _node("b", 1)])

    assert [a.node for a in _started(pool)] == ["b"]
    assert pool.num_workers == 2


def test_room_that_others_hold_is_not_used() -> None:
    pool = _pool(1, 4, _node("a", 1, 4))
    _started(pool)

    pool.survey([_node("a", 0, 4)])

    assert _of(Start, pool.decide(1.0)) == []


def test_room_that_others_leave_is_used() -> None:
    pool = _pool(1, 4, _node("a", 1, 4))
    _started(pool)

    pool.survey([_node("a", 2, 4)])

    assert len(_started(pool)) == 2


def test_room_is_not_counted_twice_while_a_worker_starts() -> None:
    pool = _pool(1, 2, _node("a", 1), _node("b", 0, 1))
    pool.decide(0.0)

    pool.survey([_node("a", 1), _node("b", 0, 1)])  # Ray has not placed it yet

    assert _of(Start, pool.decide(0.1)) == []


def test_fixed_pool_queues_for_room_that_others_hold() -> None:
    pool = _pool(1, 2, _node("a", 1, 2), is_fixed=True)

    assert pool.decide(0.0) == [Start("worker 0", "a"), Start("worker 1", None)]


def test_fixed_pool_does_not_queue_for_room_that_is_gone() -> None:
    pool = _pool(1, 2, _node("a", 1), _node("b", 1), is_fixed=True)
    _started(pool)

    pool.survey([_node("a", 0, 1)])

    assert _of(Start, pool.decide(1.0)) == []
    assert pool.num_workers == 1


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "drains"])
def test_idle_worker_moves_off_a_node_that_leaves(is_gone: bool) -> None:
    pool = _pool(1, 1, _node("a", 1))
    _started(pool)

    leaving = [] if is_gone else [_node("a", 0, 1, is_draining=True)]
    pool.survey([*leaving, _node("b", 1)])

    assert pool.decide(1.0) == [
        Stop("worker 0", "its node goes"),
        Start("worker 1", "b"),
    ]


def test_leased_worker_of_a_draining_node_finishes_and_goes() -> None:
    pool = _pool(1, 1, _node("a", 1))
    _started(pool)
    pool.ask("x")
    pool.decide(0.0)
    draining = [_node("a", 0, 1, is_draining=True), _node("b", 1)]
    pool.survey(draining)

    before = pool.decide(1.0)
    pool.give_back("worker 0")
    pool.ask("y")
    after = pool.decide(2.0)

    assert before == [Start("worker 1", "b")]
    assert after == [Stop("worker 0", "its node goes")]


@pytest.mark.parametrize(
    ("told", "counted"),
    [("crash", "preemption"), ("memory", "memory")],
    ids=["crash", "memory"],
)
def test_class_of_a_death_while_draining(
    told: FailureClass, counted: FailureClass
) -> None:
    pool = _pool(1, 1, _node("a", 1))
    _started(pool)
    for node, following in ["ab", "bc"][: BUDGETS[counted] + 1]:
        (grant,) = _grants(pool, "x", 0.0)
        pool.survey([_node(node, 0, 1, is_draining=True)])
        pool.lost(grant.worker, told, "it died")
        pool.survey([_node(following, 1)])
        _started(pool)
    pool.ask("x")

    (refusal,) = _of(Refuse, pool.decide(9.0))

    assert isinstance(refusal, Refuse)
    assert refusal.failure_class == counted


def _grants(pool: Pool, subround: str, now_s: float) -> list[Grant]:
    pool.ask(subround)
    return [a for a in pool.decide(now_s) if isinstance(a, Grant)]


def test_replacement_prefers_another_node_than_that_of_the_loss() -> None:
    pool = _pool(1, 2, _node("a", 2), _node("b", 2))
    _started(pool)

    pool.lost("worker 0", "crash", "it died")

    assert _of(Start, pool.decide(1.0)) == [Start("worker 2", "b")]


def test_replacement_takes_the_node_of_the_loss_where_there_is_no_other() -> None:
    pool = _pool(1, 1, _node("a", 1))
    _started(pool)

    pool.lost("worker 0", "crash", "it died")

    assert _of(Start, pool.decide(1.0)) == [Start("worker 1", "a")]


def test_no_worker_is_granted_below_the_least() -> None:
    pool = _pool(2, 4, _node("a", 1))
    _started(pool)

    assert _grants(pool, "x", 0.0) == []


def test_workers_are_granted_once_there_is_room_for_the_least() -> None:
    pool = _pool(2, 4, _node("a", 1))
    _started(pool)
    pool.ask("x")
    pool.decide(0.0)

    pool.survey([_node("a", 0, 1), _node("b", 1)])

    assert len(_of(Grant, pool.decide(1.0))) == 1


def test_worker_that_lives_is_granted_while_a_replacement_starts() -> None:
    pool = _pool(2, 2, _node("a", 2))
    _started(pool)

    pool.lost("worker 0", "crash", "it died")
    pool.ask("x")
    found = pool.decide(1.0)

    assert [type(action) for action in found] == [Start, Grant]


def test_pool_looks_at_the_cluster_while_somebody_waits_for_room() -> None:
    pool = _pool(1, 2, _node("a", 0))
    pool.ask("x")

    first = pool.decide(0.0)
    due = pool.next_deadline_s()
    second = pool.decide(LOOK_S)

    assert _of(Look, first) == []
    assert due == LOOK_S
    assert second == [Look()]


def test_pool_does_not_look_while_nobody_waits() -> None:
    pool = _pool(1, 2, _node("a", 0))
    pool.decide(0.0)

    assert pool.next_deadline_s() is None


def test_pool_does_not_look_while_enough_workers_start() -> None:
    pool = _pool(1, 2, _node("a", 1))
    pool.ask("x")
    pool.decide(0.0)

    assert _of(Look, pool.decide(LOOK_S)) == []


def test_shortage_refuses_everyone_after_the_configured_time() -> None:
    pool = _pool(2, 4, _node("a", 1), _node("b", 1, is_draining=True))
    _started(pool)
    tickets = [pool.ask("x"), pool.ask("y")]
    pool.decide(5.0)

    before = pool.decide(5.0 + WAIT_TIMEOUT_S - 0.1)
    refusals = _of(Refuse, pool.decide(5.0 + WAIT_TIMEOUT_S))

    message = (
        "Expected at least 2 workers (`workers.count`), each with 1 CPU, found 1 after"
        " 30 s (`workers.wait_timeout_s`), and 2 nodes (1 draining) with room for 1."
        " Add nodes, lower what `workers` asks for, or wait longer."
    )
    assert _of(Refuse, before) == []
    assert refusals == [Refuse(ticket, message, SHORTAGE) for ticket in tickets]


def test_pool_is_usable_after_a_shortage() -> None:
    pool = _pool(2, 4, _node("a", 1))
    _started(pool)
    pool.ask("x")
    pool.decide(0.0)
    pool.decide(WAIT_TIMEOUT_S)

    pool.survey([_node("a", 0, 1), _node("b", 1)])
    pool.ask("x")
    waiting = pool.decide(9 * WAIT_TIMEOUT_S)

    assert [type(action) for action in waiting] == [Start, Grant]


def test_time_that_nobody_waited_does_not_count() -> None:
    pool = _pool(2, 4, _node("a", 1))
    _started(pool)
    pool.withdraw(pool.ask("x"))
    pool.decide(0.0)
    pool.ask("y")

    assert _of(Refuse, pool.decide(WAIT_TIMEOUT_S)) == []


def test_all_that_is_wanted_is_requested_while_there_is_no_room() -> None:
    pool = _pool(1, 4, _node("a", 1))

    first = pool.decide(0.0)
    again = pool.decide(1.0)

    assert first == [Start("worker 0", "a"), Request(4)]
    assert again == []


def test_request_is_withdrawn_when_all_have_room() -> None:
    pool = _pool(1, 2, _node("a", 1))
    _started(pool)

    pool.survey([_node("a", 0, 1), _node("b", 1)])

    assert pool.decide(1.0) == [Start("worker 1", "b"), Request(0)]


def test_request_is_made_anew_when_a_node_is_lost() -> None:
    pool = _pool(1, 2, _node("a", 1), _node("b", 1))
    _started(pool)

    pool.survey([_node("a", 0, 1)])

    assert _of(Request, pool.decide(1.0)) == [Request(2)]


def test_nothing_is_requested_where_starts_fail_for_another_reason() -> None:
    pool = _pool(1, 2, _node("a", 2))
    for _ in range(5):
        for start in _of(Start, pool.decide(0.0)):
            assert isinstance(start, Start)
            pool.lost(start.worker, "crash", "no such device")

    assert _of(Request, pool.decide(1.0)) == []


def test_refused_worker_is_not_started_again_on_its_node() -> None:
    pool = _pool(1, 2, _node("a", 1), _node("b", 1))
    first, second = (a for a in pool.decide(0.0) if isinstance(a, Start))
    pool.ready(first.worker, "a")

    pool.bar(second.worker, "b", "numpy is 1 where the driver has 2")

    assert _of(Start, pool.decide(1.0)) == []
    assert pool.num_workers == 1


def test_ticket_is_refused_at_once_where_all_workers_were() -> None:
    pool = _pool(1, 2, _node("a", 1))
    (start,) = (a for a in pool.decide(0.0) if isinstance(a, Start))
    pool.ask("x")

    pool.bar(start.worker, "a", "numpy is 1 where the driver has 2.")

    (refusal,) = _of(Refuse, pool.decide(1.0))
    assert isinstance(refusal, Refuse)
    assert "refused: numpy is 1 where the driver has 2." in refusal.message


def test_node_that_comes_back_is_not_barred_any_more() -> None:
    pool = _pool(1, 1, _node("a", 1))
    (start,) = (a for a in pool.decide(0.0) if isinstance(a, Start))
    pool.bar(start.worker, "a", "numpy is 1 where the driver has 2.")
    pool.survey([_node("b", 0)])

    pool.survey([_node("a", 1)])

    assert [a.node for a in _started(pool)] == ["a"]
