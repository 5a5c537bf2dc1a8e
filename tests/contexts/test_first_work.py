"""Work that computes the keys of a selection runs first, once, and hands on values."""

import pathlib
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from tests.fixtures import EACH_BACKEND, ContextFactory, report_of
from tests.result_bits import bits
from tests.waiting_work import count_marks, mark

NUM_CLIENTS = 9
ROWS = 8
INDEX = np.int32
KEYS = fl.TensorType(np.int32, [3])
TABLE = fl.TensorType(np.float32, [ROWS, 2])
CLIENTS = fl.FederatedType(INDEX, fl.CLIENTS)
AT_SERVER = fl.FederatedType(TABLE, fl.SERVER)
VALUES = np.random.default_rng(0).random((ROWS, 2), np.float32)
INDICES = [np.int32(i) for i in range(NUM_CLIENTS)]


def add(total: Any, row: Any) -> Any:
    return total + row


@rtf.computation(TABLE, np.int32)
def gather(table: Any, key: Any) -> Any:
    return table[key]


@rtf.computation(fl.SequenceType(fl.TensorType(np.float32, [2])))
def add_up(rows: Any) -> Any:
    return rows.reduce(tf.zeros([2]), add)


@rtf.computation(INDEX)
def keys_of(client: Any) -> Any:
    return (client + tf.constant([0, 1, 5])) % ROWS


@rtf.computation(fl.TensorType(np.float32, [2]))
def keys_of_row(row: Any) -> Any:
    return tf.cast(row * ROWS, tf.int32)


@rtf.computation(fl.TensorType(np.float32, [2]))
def quarter(row: Any) -> Any:
    return row / 4


@rtf.computation(INDEX)
def keys_that_fail(client: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_none_equal(client, 5)]):
        return keys_of(client)


@rtf.computation(INDEX)
def keys_out_of_range(client: Any) -> Any:
    return tf.where(client == 5, [0, ROWS + 1, 0], keys_of(client))


def select(keys: Any, table: Any) -> Any:
    return fl.federated_select(
        keys, fl.federated_value(ROWS - 1, fl.SERVER), table, gather
    )


def keyed_by(make_keys: Any) -> Any:
    """Return a computation that sums what such keys select."""

    @fl.federated_computation(CLIENTS, AT_SERVER)
    def run(clients: Any, table: Any) -> Any:
        rows = select(fl.federated_map(make_keys, clients), table)
        return fl.federated_sum(fl.federated_map(add_up, rows))

    return run


def drawing(folder: pathlib.Path) -> Any:
    """Return one whose first work draws, and whose last takes what that drew."""

    @rtf.computation(INDEX)
    def draw(client: Any) -> Any:
        return mark(tf.random.uniform([3]), folder, tf.strings.as_string(client))

    @rtf.computation(fl.TensorType(np.float32, [3]))
    def as_keys(drawn: Any) -> Any:
        return tf.cast(drawn * ROWS, tf.int32)

    @rtf.computation(
        fl.SequenceType(fl.TensorType(np.float32, [2])),
        KEYS,
        fl.TensorType(np.float32, [3]),
    )
    def use(rows: Any, keys: Any, drawn: Any) -> Any:
        total = rows.reduce(tf.zeros([2]), add)
        return {"total": total, "keys": keys, "drawn": drawn}

    @fl.federated_computation(CLIENTS, AT_SERVER)
    def run(clients: Any, table: Any) -> Any:
        drawn = fl.federated_map(draw, clients)
        keys = fl.federated_map(as_keys, drawn)
        used = fl.federated_map(use, (select(keys, table), keys, drawn))
        return used, fl.federated_sum(fl.federated_map(add_up, select(keys, table)))

    return run


@fl.federated_computation(CLIENTS, AT_SERVER)
def by_what_keys_selected(clients: Any, table: Any) -> Any:
    """A selection by keys that depend on another selection."""
    first = fl.federated_map(add_up, select(fl.federated_map(keys_of, clients), table))
    halves = fl.federated_map(quarter, first)
    rows = select(fl.federated_map(keys_of_row, halves), table)
    return fl.federated_sum(fl.federated_map(add_up, rows)), fl.federated_sum(first)


@fl.federated_computation(CLIENTS, AT_SERVER, fl.FederatedType(KEYS, fl.SERVER))
def by_keys_of_the_server(clients: Any, table: Any, keys: Any) -> Any:
    rows = select(fl.federated_broadcast(keys), table)
    return fl.federated_sum(fl.federated_map(add_up, rows)), fl.federated_sum(clients)


SETTINGS = {"workers": 2, "subrounds": 3, "clients_per_leaf": 2}
"""Of what `build` builds."""


def of_both_ways(build: ContextFactory, comp: Any, *args: Any) -> Any:
    """Return the result with kernels, after a look at the bits without."""
    found: list[Any] = []
    for enabled in (True, False):
        context = build(kernels={"enabled": enabled})
        context.resume_at(0)
        found.append(context.invoke(comp, list(args)))
        report = report_of(context)
        assert (report.kernel_leaves > 0) == enabled
        assert not (enabled and report.no_kernel)
    with_kernels, without = map(bits, found)
    assert with_kernels == without
    return found[0]


def keys_by_numpy(client: int) -> Any:
    return (client + np.array([0, 1, 5])) % ROWS


def test_keys_that_clients_compute_are_those_of_numpy(build: ContextFactory) -> None:
    found = of_both_ways(build, keyed_by(keys_of), INDICES, VALUES)

    expected = sum(VALUES[keys_by_numpy(i)].sum(0) for i in range(NUM_CLIENTS))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@EACH_BACKEND
def test_work_that_keys_and_the_rest_need_is_done_once(
    build: ContextFactory, tmp_path: pathlib.Path
) -> None:
    used, total = of_both_ways(build, drawing(tmp_path), INDICES, VALUES)

    drawn = np.stack([one["drawn"] for one in used])
    keys = np.stack([one["keys"] for one in used])
    assert len(np.unique(drawn)) == NUM_CLIENTS * 3  # each drew its own
    np.testing.assert_array_equal(keys, (drawn * ROWS).astype(np.int32))
    rows = VALUES[keys].sum(1)
    np.testing.assert_allclose([one["total"] for one in used], rows, rtol=1e-5)
    np.testing.assert_allclose(total, rows.sum(0), rtol=1e-5)
    assert count_marks(tmp_path, NUM_CLIENTS) == [2] * NUM_CLIENTS  # once each way


def test_keys_may_depend_on_what_other_keys_selected(build: ContextFactory) -> None:
    found, first = of_both_ways(build, by_what_keys_selected, INDICES, VALUES)

    sums = [VALUES[keys_by_numpy(i)].sum(0) for i in range(NUM_CLIENTS)]
    keys = [(total / 4 * ROWS).astype(np.int32) for total in sums]
    expected = sum(VALUES[chosen].sum(0) for chosen in keys)
    np.testing.assert_allclose(first, np.sum(sums, 0), rtol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_keys_may_be_the_same_for_all_clients(build: ContextFactory) -> None:
    keys = np.array([1, 1, 7], np.int32)

    found, count = of_both_ways(build, by_keys_of_the_server, INDICES, VALUES, keys)

    assert count == sum(range(NUM_CLIENTS))
    np.testing.assert_allclose(found, VALUES[keys].sum(0) * NUM_CLIENTS, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (keys_that_fail, "Condition x != y did not hold"),
        (keys_out_of_range, r"from 0 to max_key=7, found \[0, 9, 0\]"),
    ],
    ids=["raises", "is out of range"],
)
def test_a_client_whose_first_work_fails_is_named(
    build: ContextFactory, keys: Any, text: str
) -> None:
    with pytest.raises(errors.ComputationError, match=text) as raised:
        build().invoke(keyed_by(keys), [INDICES, VALUES])

    assert raised.value.location.client_index == 5
