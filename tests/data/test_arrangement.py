"""What is done with a client's rows: in one order, by the seed, the call and the id."""

import itertools
from typing import Any

import federated_language as fl
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.errors as errors
from ray_fed.plan import random_keys
from ray_fed.plan.random_keys import DrawKey
from ray_fed.program import ClientData
from tests.data import tables

ROWS = fl.SequenceType(np.int32)


def of_sizes(*sizes: int) -> ClientData:
    clients = {i: list(range(100 * i, 100 * i + n)) for i, n in enumerate(sizes)}
    return ClientData.from_values(clients, ROWS)


def rows_of(data: ClientData, seed: int = 0, call: int = 0) -> list[list[Any]]:
    """Return each client's elements, as a call of a context with a seed reads them."""
    with random_keys.using(DrawKey(seed, call)):
        return [
            [np.asarray(tensors[0]).tolist() for tensors in member.read()]
            for member in data
        ]


def test_steps_come_in_one_order_whatever_the_order_of_calls() -> None:
    data = of_sizes(7)

    one = data.take(5).epochs(2).batch(2)
    other = data.batch(2).epochs(2).take(5)

    assert rows_of(one) == rows_of(other) == [[[0, 1], [2, 3], [4]] * 2]
    assert str(one.type_signature) == "int32[?]*"
    assert one.weights is not None
    assert one.weights.tolist() == [10.0]


@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_batches_end_with_their_epoch(size: int) -> None:
    for epochs, drop_remainder in itertools.product((1, 3), (True, False)):
        data = of_sizes(7, 0, 2).epochs(epochs)

        found = rows_of(data.batch(size, drop_remainder=drop_remainder))

        for client, count in enumerate((7, 0, 2)):
            rows = [100 * client + i for i in range(count)]
            batches = [rows[i : i + size] for i in range(0, count, size)]
            if drop_remainder:
                batches = [batch for batch in batches if len(batch) == size]
            assert found[client] == batches * epochs


@pytest.mark.parametrize("step", ["batch", "shuffle", "neither"])
def test_rows_of_all_epochs_have_a_bound(local_contexts: Any, step: str) -> None:
    workers = ray_fed.Workers(count=2, client_bytes=2**16)
    context = local_contexts(workers=workers)
    data = of_sizes(3).epochs(10_000)
    steps: dict[str, Any] = {"batch": lambda: data.batch(2), "shuffle": data.shuffle}
    arranged = steps.get(step, lambda: data)()

    def add(total: Any, row: Any) -> Any:
        del row
        return total + 1

    count_all = tables.sum_over_clients(arranged, np.int64(0), add)

    with pytest.raises(
        errors.ValueMismatchError,
        match=r"10000 `epochs` of the client 0 to take at most 65536 bytes, found"
        r" 360000: lower `epochs`\. If .* raise `workers\.client_bytes`",
    ):
        context.invoke(count_all, arranged)


@pytest.mark.parametrize("size", [None, 2])
def test_clients_without_rows_have_any_number_of_epochs(size: int | None) -> None:
    data = of_sizes(0).epochs(10**12).batch(size)

    assert rows_of(data) == rows_of(data.shuffle()) == [[]]


def test_order_is_anew_in_each_call_epoch_and_client_and_that_of_the_seed() -> None:
    data = of_sizes(20, 20).epochs(2).shuffle()

    first, again, later = (rows_of(data, 7, call) for call in (3, 3, 4))
    other_seed = rows_of(data, 8, 3)
    selected = rows_of(data.select([1]), 7, 3)

    assert first == again
    assert first[1] == selected[0]
    epochs = [rows[a : a + 20] for rows in (*first, *later) for a in (0, 20)]
    assert all(sorted(e) in (list(range(20)), list(range(100, 120))) for e in epochs)
    assert len({tuple(np.array(e) % 100) for e in epochs}) == 8
    assert other_seed[0] != first[0]
    fixed = data.shuffle(seed=1)
    assert rows_of(fixed, 7, 3) == rows_of(fixed, 8, 3) != first


def test_orders_are_uniform() -> None:
    data = of_sizes(3).shuffle()
    counts: dict[tuple[int, ...], int] = {}

    for call in range(600):
        order = tuple(rows_of(data, 0, call)[0])
        counts[order] = counts.get(order, 0) + 1

    found = np.array(list(counts.values()))
    assert len(found) == 6
    assert ((found - 100) ** 2 / 100).sum() < 20.5  # chi-square, 5 degrees, 0.001


def test_rows_held_out_are_the_others_in_each_client() -> None:
    data = of_sizes(10, 3, 0)

    kept, held = data.hold_out_rows(0.3, seed=5)

    kept_rows, held_rows = rows_of(kept), rows_of(held)
    assert [len(rows) for rows in held_rows] == [3, 1, 0]
    for index, whole in enumerate(rows_of(data)):
        assert sorted(kept_rows[index] + held_rows[index]) == whole
    assert rows_of(data.hold_out_rows(0.3, seed=6)[1]) != held_rows
    assert rows_of(kept.batch(4)) == [
        [rows[i : i + 4] for i in range(0, len(rows), 4)] for rows in kept_rows
    ]


def test_last_rows_are_held_out_of_a_table_in_order_of_time() -> None:
    frame = pd.DataFrame(
        {
            "who": ["b", "a", "b", "a", "b", "b"],
            "time": [5, 1, 3, 2, 9, 7],
            "x": range(6),
        }
    ).sort_values("time")
    data = ClientData.from_table(frame, client="who", x="x")

    kept, held = data.hold_out_rows(0.25, last=True)
    both, halves = kept.shuffle().hold_out_rows(0.5, last=True)

    groups = frame.groupby("who")["x"]
    expected = {who: rows.tolist() for who, rows in groups}
    assert dict(zip(held.ids, rows_of(held), strict=True)) == {
        "a": [],
        "b": expected["b"][-1:],
    }
    assert rows_of(kept) == [expected["a"], expected["b"][:-1]]
    assert [sorted(rows) for rows in rows_of(both)] == [
        expected["a"][:1],
        sorted(expected["b"][:1]),
    ]
    assert [len(rows) for rows in rows_of(halves)] == [1, 2]
    assert held.weights is not None
    np.testing.assert_array_equal(held.weights, [0, 1])
    for part in (kept, both, halves):
        assert part.weights is not None
        assert part.weights.tolist() == [len(rows) for rows in rows_of(part)]


@pytest.mark.parametrize(
    ("ids", "of_numpy"),
    [
        ([3, 4], np.array([3, 4])),
        (["a", "b"], np.array(["a", "b"])),
        ([("a", 1), ("a", 2)], [("a", np.int64(1)), (np.str_("a"), 2)]),
    ],
    ids=["integers", "strings", "tuples"],
)
def test_rows_of_a_client_do_not_depend_on_the_class_of_its_id(
    ids: Any, of_numpy: Any
) -> None:
    of_python, other = (
        ClientData.from_function(given, lambda _: range(20), ROWS)
        for given in (ids, of_numpy)
    )

    train, test = of_python.hold_out_rows(0.5)[0], other.hold_out_rows(0.5)[1]

    for index in range(2):
        assert sorted(train.read(index) + test.read(index)) == list(range(20))
    assert rows_of(of_python.shuffle()) == rows_of(other.shuffle())


def test_rows_that_are_held_out_stay_out() -> None:
    data = of_sizes(40, 7)

    kept, test = data.hold_out_rows(0.25, seed=1)
    train, validation = kept.hold_out_rows(0.25, seed=2)

    for index, whole in enumerate(rows_of(data)):
        parts = [rows_of(part)[index] for part in (train, validation, test)]
        assert sorted(itertools.chain(*parts)) == whole
    assert [list(map(len, rows_of(p))) for p in (train, validation, test)] == [
        [22, 4],
        [8, 1],
        [10, 2],
    ]


def test_the_least_of_several_takes_counts() -> None:
    data = of_sizes(9)

    assert rows_of(data.take(2).take(5)) == rows_of(data.take(5).take(2)) == [[0, 1]]


def test_clients_held_out_are_the_others() -> None:
    data = of_sizes(*[1] * 10)

    kept, held = data.hold_out_clients(0.2, seed=3)

    assert (len(kept), len(held)) == (8, 2)
    assert sorted([*kept.ids, *held.ids], key=str) == list(data.ids)
    assert data.hold_out_clients(0.2, seed=3)[1].ids == held.ids


def test_map_makes_rows_of_rows_before_they_are_batched() -> None:
    table = tables.make_table(4)
    data = ClientData.from_table(table, client="who", x="a", y="y", batch_size=3)

    def convert(row: Any) -> Any:
        label = 1.0 if row["y"] > 2 else 0.0  # autograph makes a `tf.cond` of it
        return {"x": tf.stack([row["x"], -row["x"]]), "y": label}

    mapped = data.map(convert)

    signature = "<x=float32[?,2],y=float32[?]>*"
    assert str(mapped.type_signature) == signature
    wanted = tables.expected(table, ["a", "y"], 3)
    for client, batches in tables.read(mapped).items():
        for (x, y), (a, label) in zip(batches, wanted[client], strict=True):
            np.testing.assert_array_equal(x, np.stack([a, -a], axis=1))
            np.testing.assert_array_equal(y, (label > 2).astype(np.float32))


def test_rows_arranged_on_workers_have_the_bits_of_plain_ones(
    local_contexts: Any,
) -> None:
    def scale(row: Any) -> Any:
        return tf.cast(row, tf.float32) / 7

    data = of_sizes(9, 4, 6, 0, 1).map(scale)
    data = data.shuffle().epochs(2).batch(4)

    def add(state: Any, batch: Any) -> Any:
        places = tf.cast(tf.range(1, tf.shape(batch)[0] + 1), tf.float32)
        return state * 1.7 + tf.reduce_sum(batch * places)

    total = tables.sum_over_clients(data, np.float32(0.5), add)
    found: list[list[Any]] = []
    for settings in ({"workers": 1}, {"workers": 2, "subrounds": 3}):
        context = local_contexts(seed=11, **settings)
        found.append([context.invoke(total, data) for _ in range(3)])
    plain = local_contexts(seed=11, workers=1)
    for call in range(3):
        batches = [
            [np.array(b, np.float32) for b in rows] for rows in rows_of(data, 11, call)
        ]
        expected = plain.invoke(total, batches)
        assert found[0][call] == found[1][call] == expected
    assert len(set(found[0])) == 3


@pytest.mark.ray
def test_workers_of_ray_arrange_rows_with_the_same_bits(
    ray_contexts: Any, local_contexts: Any
) -> None:
    data = of_sizes(9, 4, 6).shuffle().batch(4)

    def add(state: Any, batch: Any) -> Any:
        return state * 7 + batch[0]

    total = tables.sum_over_clients(data, np.int32(0), add)
    contexts = [ray_contexts(workers=2, subrounds=2), local_contexts(workers=1)]
    found = [[context.invoke(total, data) for _ in range(2)] for context in contexts]

    assert found[0] == found[1]


@pytest.mark.ray
@pytest.mark.parametrize(
    "options",
    [{}, {"jit_compile": True}, {"input_signature": [tf.TensorSpec([], tf.int32)]}],
    ids=["plain", "compiled", "signature"],
)
def test_workers_of_ray_map_rows_by_a_traced_function(
    ray_contexts: Any, local_contexts: Any, options: Any
) -> None:
    @tf.function(**options)
    def triple(row: Any) -> Any:
        return tf.where(row > 100, row * 3, row)

    triple(tf.constant(1))
    data = of_sizes(9, 4, 6).map(triple)

    total = tables.sum_over_clients(data, np.int32(0), tf.add)
    contexts = [local_contexts(workers=1), ray_contexts(workers=2, subrounds=2)]
    found = [context.invoke(total, data) for context in contexts]

    rows = [row for client in rows_of(of_sizes(9, 4, 6)) for row in client]
    assert found == [sum(row * 3 if row > 100 else row for row in rows)] * 2


def test_rows_are_mapped_by_one_graph_whatever_their_number() -> None:
    traced: list[Any] = []

    def note(row: Any) -> Any:
        traced.append(row)
        return row + 1

    data = of_sizes(*range(8)).map(note)
    first = rows_of(data[1:2])
    num_traced = len(traced)

    rest = rows_of(data[2:])

    assert first + rest == [[100 * i + k + 1 for k in range(i)] for i in range(1, 8)]
    assert len(traced) == num_traced


def add_noise(row: Any) -> Any:
    return row + tf.random.uniform([])


@pytest.mark.parametrize(
    ("step", "argument", "message"),
    [
        ("take", 0, "`take` to be a whole number of at least 1"),
        ("shuffle", "a", "`seed` to be a whole number of at least 0, found 'a'"),
        ("shuffle", float("nan"), "`seed` to be a whole number of at least 0"),
        ("shuffle", -1, "`seed` to be a whole number of at least 0"),
        ("map", 3, "a function as `function`, found 3"),
        ("epochs", 1.5, "`epochs` to be a whole number"),
        ("hold_out_rows", 1.0, "`fraction` above 0 and below 1"),
        ("hold_out_clients", 0.5, "at least 2 clients"),
        ("map", add_noise, "random"),
    ],
)
def test_bad_arrangements_are_refused(step: str, argument: Any, message: str) -> None:
    data = ClientData.from_values([[0.5]], fl.SequenceType(np.float32))

    with pytest.raises(errors.UserError, match=message):
        getattr(data, step)(argument)


def test_clients_without_rows_to_arrange_are_refused() -> None:
    data = ClientData.from_values([1.0], np.float32)

    with pytest.raises(errors.UnsupportedError, match="a sequence of rows each"):
        data.batch(2)
