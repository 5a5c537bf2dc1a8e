"""Every evaluation of a function draws its own numbers: a table of (intrinsic, slot).

The expectation is a count: so many evaluations, so many different numbers. Draws are
of 53 bits, so that equal ones are no chance.
"""

import asyncio
import dataclasses
import os
import signal
import threading
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.language.structs import Struct
from ray_fed.observability import events
from ray_fed.plan.random_keys import DrawKey, using
from ray_fed.tensorflow.kernels.graph_builder import GraphBuilder, GraphImporter
from ray_fed.worker.debugging_factory import thread_debugging_executor_factory
from tests.fixtures import ContextFactory, report_of

flf = fl.framework

NUM_CLIENTS = 8
LEAF = 2
"""Clients of a leaf: four leaves, so three merges."""

TABLE = fl.TensorType(np.float64, [NUM_CLIENTS])
"""A draw for each client, or for each merge, by a place that nobody else has."""
PARTIAL = fl.StructType([("table", TABLE), ("first", np.int32)])
"""And the index of the first client, which tells which merge is which."""
CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
SEQUENCE = fl.SequenceType(np.int32)
NUM_ELEMENTS = 3


def uniform() -> Any:
    return tf.random.uniform([], dtype=tf.float64)


def put(index: Any, value: Any) -> Any:
    return tf.one_hot(index, NUM_CLIENTS, dtype=tf.float64) * value


@rtf.computation
def draw() -> Any:
    return uniform()


@rtf.computation(np.int32)
def draw_for(x: Any) -> Any:
    return put(x, uniform())


@rtf.computation(np.int32, np.float64)
def put_drawn(x: Any, value: Any) -> Any:
    return put(x, value)


@rtf.computation(np.float64)
def draw_after(x: Any) -> Any:
    return tf.stack([x, uniform()])


@rtf.computation
def empty() -> Any:
    return {"table": tf.zeros([NUM_CLIENTS], tf.float64), "first": NUM_CLIENTS}


@rtf.computation(PARTIAL, np.int32)
def add(partial: Any, x: Any) -> Any:
    return {"table": partial["table"], "first": tf.minimum(partial["first"], x)}


@rtf.computation(PARTIAL, np.int32)
def add_a_draw(partial: Any, x: Any) -> Any:
    table = partial["table"] + put(x, uniform())
    return {"table": table, "first": tf.minimum(partial["first"], x)}


@rtf.computation(PARTIAL, PARTIAL)
def join(left: Any, right: Any) -> Any:
    first = tf.minimum(left["first"], right["first"])
    return {"table": left["table"] + right["table"], "first": first}


@rtf.computation(PARTIAL, PARTIAL)
def join_with_a_draw(left: Any, right: Any) -> Any:
    drawn = put(right["first"], uniform())
    first = tf.minimum(left["first"], right["first"])
    return {"table": left["table"] + right["table"] + drawn, "first": first}


@rtf.computation(PARTIAL)
def table_of(partial: Any) -> Any:
    return partial["table"]


@rtf.computation(PARTIAL)
def table_with_a_draw(partial: Any) -> Any:
    return tf.concat([partial["table"], [uniform()]], 0)


def aggregated(values: Any, accumulate: Any, merge: Any, report: Any) -> Any:
    return fl.federated_aggregate(values, empty(), accumulate, merge, report)


@fl.federated_computation(CLIENTS)
def in_map(values: Any) -> Any:
    return fl.federated_sum(fl.federated_map(draw_for, values))


@fl.federated_computation(CLIENTS)
def in_lambda(values: Any) -> Any:
    @fl.federated_computation(np.int32)
    def twice(x: Any) -> Any:
        return put_drawn(x, draw()), put_drawn(x, draw()), draw_for(x)

    return fl.federated_sum(fl.federated_map(twice, values))


@fl.federated_computation(CLIENTS)
def in_eval_at_clients(values: Any) -> Any:
    drawn = [fl.federated_eval(draw, fl.CLIENTS) for _ in range(2)]
    pairs = [fl.federated_map(put_drawn, (values, numbers)) for numbers in drawn]
    return [fl.federated_sum(pair) for pair in pairs]


@fl.federated_computation(CLIENTS)
def in_accumulate(values: Any) -> Any:
    return aggregated(values, add_a_draw, join, table_of)


@fl.federated_computation(CLIENTS)
def in_merge(values: Any) -> Any:
    return aggregated(values, add, join_with_a_draw, table_of)


@fl.federated_computation(CLIENTS)
def in_accumulate_merge_and_report(values: Any) -> Any:
    return aggregated(values, add_a_draw, join_with_a_draw, table_with_a_draw)


def accumulated_and_merged(values: Any) -> Any:
    accumulated = aggregated(values, add_a_draw, join, table_of)
    return accumulated, aggregated(values, add, join_with_a_draw, table_of)


@fl.federated_computation(CLIENTS)
def in_two_aggregations(values: Any) -> Any:
    return [accumulated_and_merged(values), accumulated_and_merged(values)]


@rtf.computation(np.int32, TABLE)
def same(x: Any, table: Any) -> Any:
    return x + tf.cast(0 * table[0], tf.int32)


@fl.federated_computation(CLIENTS)
def in_two_stages(values: Any) -> Any:
    first = accumulated_and_merged(values)
    sent = fl.federated_broadcast(first[1])
    return first, accumulated_and_merged(fl.federated_map(same, (values, sent)))


@rtf.computation
def empty_with_a_draw() -> Any:
    return {"table": put(NUM_CLIENTS - 1, uniform()), "first": NUM_CLIENTS}


@fl.federated_computation(CLIENTS)
def in_zero(values: Any) -> Any:
    """The zero is one value, from which each of the four leaves starts."""
    return fl.federated_aggregate(values, empty_with_a_draw(), add, join, table_of)


@fl.federated_computation
def at_server() -> Any:
    first, second = (fl.federated_eval(draw, fl.SERVER) for _ in range(2))
    return first, fl.federated_map(draw_after, second), draw()


@rtf.computation(np.int32)
def elements(first: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(tf.range(NUM_ELEMENTS))


@rtf.computation(np.int32)
def draw_beside_element(x: Any) -> Any:
    return put(x, uniform())


@rtf.computation(TABLE, np.int32)
def add_element(table: Any, x: Any) -> Any:
    return table + put(x, uniform())


@rtf.computation
def no_draws() -> Any:
    return tf.zeros([NUM_CLIENTS], tf.float64)


def mapped_and_reduced(sequence: Any) -> Any:
    mapped = fl.sequence_sum(fl.sequence_map(draw_beside_element, sequence))
    return mapped, fl.sequence_reduce(sequence, no_draws(), add_element)


@fl.federated_computation(CLIENTS)
def in_sequences_at_clients(values: Any) -> Any:
    @fl.federated_computation(np.int32)
    def work(x: Any) -> Any:
        return mapped_and_reduced(elements(x))

    return fl.federated_map(work, values)


@fl.federated_computation(SEQUENCE)
def in_sequences(sequence: Any) -> Any:
    return mapped_and_reduced(sequence)


@rtf.computation(np.int32)
def keys_of(x: Any) -> Any:
    return tf.stack([x % 2, 2])


@rtf.computation(np.int32, np.int32)
def select(state: Any, key: Any) -> Any:
    return put(state + key, uniform())


@rtf.computation(fl.SequenceType(TABLE))
def total(tables: Any) -> Any:
    return tables.reduce(tf.zeros([NUM_CLIENTS], tf.float64), tf.add)


def selected_by(intrinsic: Any) -> Any:
    @fl.federated_computation(CLIENTS)
    def run(values: Any) -> Any:
        state = fl.federated_value(0, fl.SERVER)
        largest = fl.federated_value(NUM_CLIENTS, fl.SERVER)
        keys = fl.federated_map(keys_of, values)
        return fl.federated_map(total, intrinsic(keys, largest, state, select))

    return run


@dataclasses.dataclass(frozen=True)
class Case:
    """A computation, its argument, and how many of its evaluations draw."""

    comp: Any
    by_client: int = 0
    by_merge: int = 0
    others: int = 0
    arg: Any = tuple(range(NUM_CLIENTS))

    def count(self, num_leaves: int) -> int:
        by_client, by_merge = self.by_client * NUM_CLIENTS, self.by_merge
        return by_client + by_merge * (num_leaves - 1) + self.others


CASES: dict[str, Case] = {
    "map, work": Case(in_map, by_client=1),
    "map, calls in a lambda": Case(in_lambda, by_client=3),
    "eval at clients, twice": Case(in_eval_at_clients, by_client=2),
    "aggregate, accumulate": Case(in_accumulate, by_client=1),
    "aggregate, merge": Case(in_merge, by_merge=1),
    "aggregate, zero": Case(in_zero, others=1),
    # Those of merges are added to those of clients, so that sums are counted.
    "aggregate, all but zero": Case(
        in_accumulate_merge_and_report, by_client=1, others=1
    ),
    "two aggregations": Case(in_two_aggregations, by_client=2, by_merge=2),
    "two stages": Case(in_two_stages, by_client=2, by_merge=2),
    "eval and apply at server": Case(at_server, others=4, arg=None),
    "sequences at clients": Case(in_sequences_at_clients, by_client=2 * NUM_ELEMENTS),
    "sequences unplaced": Case(in_sequences, others=2 * NUM_ELEMENTS, arg=(0, 1, 2)),
    "select": Case(selected_by(fl.federated_select), by_client=2),
    "secure select": Case(selected_by(fl.federated_secure_select), by_client=2),
}
OF_EACH_KIND = (
    "aggregate, all but zero",
    "two stages",
    "sequences at clients",
    "select",
)
EACH_CASE = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=name, marks=[pytest.mark.slow] * (name not in OF_EACH_KIND)
        )
        for name, case in CASES.items()
    ],
)


def draws(context: Any, case: Case) -> list[float]:
    """Return what was drawn: all that is not zero in the result."""
    argument = None if case.arg is None else list(case.arg)
    result = context.invoke(case.comp, argument)
    leaves = [np.ravel(leaf) for leaf in tf.nest.flatten(result)]
    return [float(number) for number in np.concatenate(leaves) if number]


def check_distinct(context: Any, case: Case, num_leaves: int) -> list[list[float]]:
    """Return what two calls drew, all of it distinct."""
    calls = [draws(context, case) for _ in range(2)]

    count = case.count(num_leaves)
    assert [len(found) for found in calls] == [count, count]
    assert len({*calls[0], *calls[1]}) == 2 * count
    return calls


@EACH_CASE
def test_each_evaluation_draws_another_number_whatever_runs_it(
    local_contexts: ContextFactory, case: Case
) -> None:
    found = [
        check_distinct(
            local_contexts(
                workers=workers,
                subrounds=subrounds,
                clients_per_leaf=LEAF,
                kernels={"enabled": kernels},
            ),
            case,
            NUM_CLIENTS // LEAF,
        )
        for workers, subrounds, kernels in ((1, 1, True), (3, 4, False))
    ]

    assert found[0] == found[1]


@pytest.mark.ray
@pytest.mark.slow
def test_draws_on_ray_are_those_of_one_process(
    ray_contexts: ContextFactory, local_contexts: ContextFactory
) -> None:
    local = local_contexts(workers=1, clients_per_leaf=LEAF)
    context = ray_contexts(workers=2, subrounds=4, clients_per_leaf=LEAF)

    for index, name in enumerate(OF_EACH_KIND):
        for other in (context, local):
            other.resume_at(index)
        assert draws(context, CASES[name]) == draws(local, CASES[name])


class Killer:
    """Ends the processes of all workers once the second stage has begun on them.

    They are stopped once the first stage is merged: a worker that dies while it is
    idle is replaced without an attempt that failed.
    """

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def _send(self, number: signal.Signals) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def on_event(self, event: events.Event) -> None:
        match event:
            case events.SubroundFinished(num_clients=0, subround_index=4):
                self._send(signal.SIGSTOP)
                threading.Timer(1.5, self._send, [signal.SIGKILL]).start()
            case events.SubroundFinished(subround_index=0 | 1 | 2 | 3):
                self.pids.add(event.worker_pid)
            case _:
                pass


@pytest.mark.ray
@pytest.mark.slow
def test_retry_draws_what_the_first_attempt_drew(
    ray_contexts: ContextFactory, local_contexts: ContextFactory
) -> None:
    settings = {"clients_per_leaf": LEAF}
    context = ray_contexts(workers=2, subrounds=4, **settings)
    killer = Killer()
    context.subscribe(killer)

    found = draws(context, CASES["two stages"])

    assert killer.pids
    assert report_of(context).num_retries > 0
    assert found == draws(local_contexts(**settings), CASES["two stages"])


def calls_without_names() -> Any:
    """Return a block of four calls: in a struct, an argument, and under one name."""
    call = flf.Call(draw.to_building_block())
    after = flf.Call(draw_after.to_building_block(), call)
    first = flf.Reference("x", call.type_signature)
    shadowed = flf.Block([("x", call)], flf.Struct([first, call, after]))
    return flf.Block([("x", call)], flf.Struct([first, shadowed]))


def test_calls_without_names_draw_by_their_place() -> None:
    leaf = stacks.device_stack()

    async def evaluate() -> Any:
        with using(DrawKey(seed=0, invocation=0)):
            value = await leaf.create_value(calls_without_names())
            return await value.compute()

    found = values_of(asyncio.run(evaluate()))
    importer = GraphImporter()
    importer.use_states(lambda _: tf.zeros([3], tf.int64))
    with tf.Graph().as_default():
        block = flf.Lambda(None, None, calls_without_names())
        GraphBuilder(importer).call(block, None)
    leaf.close()

    assert len(set(found)) == len(found) == 5
    assert len({site.path for site in importer.sites}) == len(importer.sites) == 5


def values_of(value: Any) -> list[float]:
    if isinstance(value, Struct):
        return [number for part in value for number in values_of(part)]
    return np.ravel(value).tolist()


NUM_LEAVES_UNCUT = NUM_CLIENTS
"""Of so small a cohort, where nobody says how many clients a leaf has."""

OF_TENSORFLOW = [
    name for name in CASES if "lambda" not in name and "sequences" not in name
]
"""What clients can run where lambdas are resolved at the top of the stack only."""


@pytest.mark.parametrize("name", OF_TENSORFLOW)
def test_debugging_stack_draws_distinct_numbers(name: str) -> None:
    factory = thread_debugging_executor_factory(clients_per_thread=3)
    context = fl.framework.SyncExecutionContext(factory)

    check_distinct(context, CASES[name], NUM_LEAVES_UNCUT)

    factory.clean_up_executor({fl.CLIENTS: NUM_CLIENTS})
    factory.clean_up_executor({})
