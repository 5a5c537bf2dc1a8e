"""A round goes on without clients that fail, where the settings allow it."""

import gc
import time
import weakref
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.cluster import worker_actor
from ray_fed.observability import events
from ray_fed.program import ClientData
from tests.fixtures import EACH_BACKEND, ContextFactory, Seen, report_of

NUM_CLIENTS = 12
MEMBERS = fl.FederatedType(np.int32, fl.CLIENTS)
SOUND = list(range(NUM_CLIENTS))
"""What each client has: its index; less than zero fails."""


def failing(*clients: int) -> list[int]:
    return [-1 - i if i in clients else i for i in SOUND]


@rtf.computation(np.int32)
def draw_alone(value: Any) -> Any:
    """Return what this client draws in a place of its own, zero in all others."""
    with tf.control_dependencies([tf.debugging.assert_non_negative(value)]):
        place = tf.one_hot(value, NUM_CLIENTS)
    return place * tf.random.uniform([])


@fl.federated_computation(MEMBERS)
def draws_of_all(members: Any) -> Any:
    return fl.federated_sum(fl.federated_map(draw_alone, members))


@rtf.computation(np.int32, np.int32)
def refuse_largest(value: Any, total: Any) -> Any:
    """Fail on the largest client of three or more: known once all are summed."""
    too_large = value * 10 > total + 55
    with tf.control_dependencies([tf.debugging.assert_equal(too_large, False)]):
        return tf.identity(value) * 100 + total


@fl.federated_computation(MEMBERS)
def in_two_stages(members: Any) -> Any:
    total = fl.federated_sum(members)
    pairs = (members, fl.federated_broadcast(total))
    return fl.federated_sum(fl.federated_map(refuse_largest, pairs)), total


@rtf.computation(np.int32)
def check(value: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_non_negative(value)]):
        return tf.identity(value)


@fl.federated_computation(MEMBERS)
def add_up(members: Any) -> Any:
    return fl.federated_sum(fl.federated_map(check, members))


@fl.federated_computation(MEMBERS)
def return_all(members: Any) -> Any:
    return fl.federated_map(check, members)


SETTINGS = {"workers": 2, "clients_per_leaf": 3, "seed": 5}
"""Of what `build` builds."""


@EACH_BACKEND
def test_others_have_the_bits_that_they_have_without_a_failure(
    build: ContextFactory, request: pytest.FixtureRequest
) -> None:
    backend = request.node.callspec.params["build"]
    clients = (3, 5, 11)
    expected = build().invoke(draws_of_all, SOUND).copy()
    expected[list(clients)] = 0

    for kernels in (True, False):
        for subrounds in (1, 4) if backend == "local" else (4,):
            context = build(
                max_dropped_clients=3,
                subrounds=subrounds,
                kernels={"enabled": kernels},
            )
            found = context.invoke(draws_of_all, failing(*clients))

            assert found.tobytes() == expected.tobytes()
            report = report_of(context)
            assert tuple(report.dropped_clients) == clients
            assert report.kernel_leaves == (4 if kernels else 0)
            assert report.num_clients == NUM_CLIENTS


def test_client_that_fails_in_a_later_stage_takes_no_part_in_earlier_ones(
    build: ContextFactory,
) -> None:
    members = [*range(1, 6), 100]
    context = build(max_dropped_clients=1, subrounds=2)

    result, total = context.invoke(in_two_stages, members)

    assert (result, total) == (15 * 100 + 5 * 15, 15)
    assert list(report_of(context).dropped_clients) == [5]


@EACH_BACKEND
def test_one_more_than_allowed_is_the_error_of_its_client(
    build: ContextFactory,
) -> None:
    context = build(max_dropped_clients=1, subrounds=2)

    with pytest.raises(ray_fed.errors.ComputationError) as raised:
        context.invoke(add_up, failing(7, 8))

    assert raised.value.location.client_index == 7
    (told,) = [note for note in raised.value.__notes__ if "max_dropped" in note]
    assert (
        told == "Expected at most 1 clients to fail (`max_dropped_clients`), found 2."
    )
    assert context.invoke(add_up, SOUND) == sum(SOUND)


@pytest.mark.parametrize(
    ("settings", "computation"),
    [({}, add_up), ({"max_dropped_clients": 3}, return_all)],
    ids=["nothing allowed", "values of clients returned"],
)
def test_clients_that_may_not_be_dropped_end_the_round(
    build: ContextFactory, settings: dict[str, Any], computation: Any
) -> None:
    with pytest.raises(ray_fed.errors.ComputationError, match="client at position 6"):
        build(**settings).invoke(computation, failing(6))


def test_round_without_a_client_left_is_that_of_an_empty_cohort(
    build: ContextFactory,
) -> None:
    context = build(max_dropped_clients=NUM_CLIENTS)

    assert context.invoke(add_up, failing(*SOUND)) == 0


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "interpreter"])
def test_client_whose_data_cannot_be_read_is_dropped(
    build: ContextFactory, kernels: bool
) -> None:
    def load(client: str) -> int:
        if client == "client 4":
            raise OSError("no such shard")
        return int(client.removeprefix("client "))

    ids = [f"client {index}" for index in SOUND]
    data = ClientData.from_function(ids, load, np.int32)
    context = build(max_dropped_clients=1, kernels={"enabled": kernels})

    assert context.invoke(add_up, data) == sum(SOUND) - 4
    ((client, reason),) = report_of(context).dropped_clients.items()
    assert client == 4
    assert "no such shard" in reason


@pytest.mark.slow
@pytest.mark.ray
def test_work_that_raised_holds_nothing(
    ray_contexts: ContextFactory, ray_memory: Any
) -> None:
    def load(client: int) -> int:
        raise OSError(f"no shard {client}")

    context = ray_contexts(workers=2)
    data = ClientData.from_function(range(3), load, np.int32)
    with pytest.raises(errors.ComputationError, match="no shard"):
        context.invoke(add_up, data)
    source = weakref.ref(data.source)
    del data

    def is_held() -> int:
        gc.collect()  # the error holds what this process had; its loop, it for a moment
        return int(source() is not None)

    assert ray_memory.settle(is_held, 0) == 0
    time.sleep(2 * worker_actor.LEFT_S)  # other processes are done with it
    context.invoke(add_up, [1, 2])  # workers are told what is gone

    assert ray_memory.left() == (0, 0)


@pytest.mark.slow
@pytest.mark.ray
def test_subrounds_that_were_ended_leave_their_workers_at_work(
    ray_contexts: ContextFactory, ray_memory: Any
) -> None:
    # Many small calls, one of which is on its way when its subround is ended. A worker
    # that answers no more costs a round ten seconds, and is another's to replace.
    context = ray_contexts(workers=2, kernels={"enabled": False}, clients_per_leaf=1)
    for _ in range(5):
        with pytest.raises(errors.ComputationError):
            context.invoke(add_up, failing(0))
        assert context.invoke(add_up, SOUND) == sum(SOUND)
        subrounds = report_of(context).subrounds
        assert [(lost.ended, lost.detail) for s in subrounds for lost in s.lost] == []

    assert ray_memory.left() == (0, 0)


def test_report_and_an_event_tell_who_was_dropped_and_why(
    local_contexts: ContextFactory,
) -> None:
    context = local_contexts(max_dropped_clients=2, subrounds=2, workers=2)
    seen = Seen()
    context.subscribe(seen)

    context.invoke(add_up, failing(10))

    (event,) = [e for e in seen if isinstance(e, events.ClientDropped)]
    assert (event.round_index, event.subround_index, event.client_index) == (0, 1, 10)
    assert "InvalidArgumentError" in event.reason
    report: Any = report_of(context)
    assert report.dropped_clients == {10: event.reason}
    assert "12 clients (1 dropped) in 2 subrounds" in str(report)
    assert "dropped the client at position 10: " in report._repr_html_()
