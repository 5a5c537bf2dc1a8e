"""Lists of clients that come again: kept by what they hold, and by nothing else."""

# pyright: reportUnknownLambdaType=false

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.values.client_references import (
    ClientReference,
    ClientRun,
    HeldSource,
    ListCache,
    NamedClients,
    check_pairs,
)
from ray_fed.values.plain_values import to_plain

ROWS = 400
BATCH = [("x", fl.TensorType(np.float32, [None, 40])), ("y", fl.TensorType(np.int32))]
DATASET = fl.SequenceType(BATCH)


TEXTS, WIDE = fl.TensorType(np.str_, [2]), fl.TensorType(np.int8, [None, 7])


class Batch(NamedTuple):
    x: Any
    y: Any


def batches_of(seed: int, kind: Callable[..., Any] = dict) -> list[Any]:
    rng = np.random.default_rng(seed)
    sizes = [ROWS, 3, ROWS]
    return [
        [kind(x=rng.normal(size=(size, 40)).astype(np.float32), y=index)]
        for index, size in enumerate(sizes)
    ]


def read(cache: ListCache | None, clients: Any, member: Any = DATASET) -> Any:
    at_clients = fl.FederatedType(member, fl.CLIENTS)
    return to_plain(clients, at_clients, "the argument", cache)


def arrays_of(clients: Sequence[Any]) -> list[Any]:
    """Return all arrays of the plain values of clients, runs read."""
    plain = [m.read() if isinstance(clients, ClientRun) else m for m in clients]
    columns = [getattr(value, "columns", None) for value in plain]
    if None in columns:
        return plain
    return [column.rows for held in columns for column in held or ()]


def assert_same(found: Any, expected: Any) -> None:
    pairs = zip(arrays_of(found), arrays_of(expected), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, Batch])
def test_a_list_that_comes_again_becomes_a_run(kind: Any) -> None:
    cache = ListCache(2**20)

    first, second, third = (read(cache, batches_of(1, kind)) for _ in range(3))

    assert type(first) is list
    assert isinstance(second, ClientRun)
    assert third is second
    assert third.weights is not None
    assert third.weights.tolist() == [ROWS, 3, ROWS]
    assert_same(third, first)


def test_a_list_that_was_written_to_is_another_one() -> None:
    cache, clients = ListCache(2**20), batches_of(1)
    kept = [read(cache, clients) for _ in range(3)][-1]
    before = read(None, batches_of(1))

    clients[2][0]["x"][200, 7] += 1  # nothing but the bytes of one number
    found = read(cache, clients)

    assert_same(found, read(None, clients))
    assert_same(kept, before)
    assert_same(read(cache, batches_of(1)), before)


@pytest.mark.parametrize(
    "change",
    [
        lambda clients: clients[1][0].update(y=5),
        lambda clients: clients[1].append(clients[1][0]),
        lambda clients: clients[0][0].update(x=clients[0][0]["x"][1:]),
        lambda clients: clients.pop(),
        lambda clients: clients[0][0]["x"].__setitem__((0, 0), -0.0),
    ],
    ids=["number", "element", "shape", "client", "sign of zero"],
)
def test_whatever_a_list_holds_counts(change: Callable[[Any], Any]) -> None:
    cache, clients = ListCache(2**20), batches_of(1)
    clients[0][0]["x"][0, 0] = 0.0
    kept = [read(cache, clients) for _ in range(2)][-1]

    change(clients)
    found = [read(cache, clients) for _ in range(3)]

    assert kept not in found
    for each in found:
        assert_same(each, read(None, clients))
    bits = [np.signbit(a).all() for a in arrays_of(found[-1])]
    assert bits == [np.signbit(a).all() for a in arrays_of(read(None, clients))]


@pytest.mark.parametrize(
    ("values", "member"),
    [
        (np.arange(20_000.0).tolist(), np.float64),
        ([np.ones((300, 99), np.float32)] * 9, fl.TensorType(np.float32, [300, 99])),
        (
            [np.asfortranarray(np.arange(20_000).reshape(100, -1))] * 2,
            fl.TensorType(np.int64, [100, 200]),
        ),
        ([np.array(index) for index in range(9_000)], np.int64),
        (["ä" * 20_000, b"b" * 80_000], np.str_),
        ([np.array(["a", f"{i}\0"], object) for i in range(9000)], TEXTS),
        ([np.ones((size, 7), np.int8) for size in (0, 90_000)], WIDE),
    ],
    ids=["floats", "same", "columns", "scalars", "text", "texts", "empty"],
)
def test_kinds_of_lists(values: Any, member: Any) -> None:
    cache = ListCache(2**22)
    expected = read(None, values, fl.to_type(member))

    found = [read(cache, values, fl.to_type(member)) for _ in range(3)]

    assert isinstance(found[2], ClientRun)
    for each in found:
        assert_same(each, expected)


def test_a_run_is_of_one_type() -> None:
    cache, other = (
        ListCache(2**20),
        fl.SequenceType(collections.OrderedDict(BATCH[::-1])),
    )
    kept = [read(cache, batches_of(1)) for _ in range(2)][-1]

    found = [read(cache, batches_of(1), other) for _ in range(2)][-1]

    assert found is not kept
    assert_same(found, read(None, batches_of(1), other))


@pytest.mark.parametrize(
    ("clients", "max_bytes"),
    [
        (batches_of(1), 0),
        (batches_of(1), 10**5),
        ([[{"x": np.ones((2, 40), np.float32), "y": 1}]] * 9, 2**30),
        ([iter(batch) for batch in batches_of(1)], 2**30),
        ([*batches_of(1), rtf.data("a.npz", DATASET)], 2**30),
        ([[{"x": np.ones((ROWS, 80), np.float32)[:, ::2], "y": 1}]] * 2, 2**30),
    ],
    ids=["none", "too large", "small", "generators", "files", "strides"],
)
def test_lists_that_stay_lists(clients: Any, max_bytes: int) -> None:
    cache = ListCache(max_bytes)

    found = [type(read(cache, clients)) for _ in range(3)]

    assert found == [list] * 3


def test_what_is_wrong_is_told_as_before() -> None:
    cache, clients = ListCache(2**20), batches_of(1)
    clients[2][0]["x"] = clients[2][0]["x"].astype(np.float64)

    for _ in range(3):
        with pytest.raises(
            errors.ValueMismatchError, match=r"`x` of batch 0 of .* position 2"
        ):
            read(cache, clients)


def test_the_least_recently_used_list_goes() -> None:
    cache, lists = ListCache(600_000), [batches_of(seed) for seed in range(3)]
    for clients in lists[:2]:
        read(cache, clients)
        read(cache, clients)
    first, second = (read(cache, clients) for clients in lists[:2])
    assert first is read(cache, lists[0])

    read(cache, lists[2])
    read(cache, lists[2])

    assert read(cache, lists[0]) is first
    assert read(cache, lists[1]) is not second
    assert_same(read(cache, lists[1]), read(None, lists[1]))


def test_copies_go_with_the_cache() -> None:
    cache = ListCache(2**20)
    read(cache, batches_of(1))
    read(cache, batches_of(1))

    cache.clear()

    assert type(read(cache, batches_of(1))) is list


AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
BY_ID = HeldSource([10, 20, 30])


def run_of(*ids: Any) -> ClientRun:
    return ClientRun(BY_ID, fl.TensorType(np.int32), np.arange(len(ids)), None, ids)


def references_to(*ids: Any) -> list[Any]:
    type_spec = fl.TensorType(np.int32)
    return [ClientReference(BY_ID, i, type_spec, c, None) for i, c in enumerate(ids)]


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (run_of("a", "b"), run_of("a", "b"), None),
        (run_of(1, 2), run_of(1, np.int64(2)), None),
        (run_of("a", "b"), [1, 2], None),
        (run_of("a", "b"), NamedClients([1, 2], "ab"), None),
        (run_of("a", "b"), run_of("b", "a"), "'a' and 'b' at index 0.*another order"),
        (run_of("a", "b"), run_of("a", "c"), "'b' and 'c' at index 1.*in one of them"),
        (run_of(7, 8), run_of("7", "8"), "7 and '7' at index 0"),
        (run_of("a", "b"), references_to("b", "a"), "'a' and 'b' at index 0"),
        (run_of("a", "b"), [1, references_to("a")[0]], "'b' and 'a' at index 1"),
        (references_to("a", "b"), NamedClients([1, 2], "ba"), "'a' and 'b' at index 0"),
    ],
)
def test_values_of_clients_are_paired_by_id(
    first: Any, second: Any, found: str | None
) -> None:
    type_spec = fl.StructType([fl.StructType([AT_CLIENTS]), np.int32, AT_CLIENTS])
    argument = ((first,), 3, second)

    if found is None:
        check_pairs(argument, type_spec)
        return
    with pytest.raises(errors.ValueMismatchError, match=f"found the ids {found}"):
        check_pairs(argument, type_spec)


def test_references_in_the_value_of_one_client_have_one_id() -> None:
    pairs = list(zip(references_to("a", "b"), references_to("a", "c"), strict=True))
    type_spec = fl.FederatedType([np.int32, np.int32], fl.CLIENTS)

    check_pairs(pairs[:1], type_spec)
    with pytest.raises(errors.ValueMismatchError, match="'b' and 'c' at index 1"):
        check_pairs(pairs, type_spec)
