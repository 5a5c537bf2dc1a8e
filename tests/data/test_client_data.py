"""Clients by reference: read where the work is, once, with the bits of plain values."""

import asyncio
import collections
import gc
import importlib
import itertools
import os
import pathlib
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import ray
import tensorflow as tf
from typing_extensions import override

import ray_fed
import ray_fed.errors as errors
from ray_fed import framework
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.language import structs
from ray_fed.program import ClientData, RayFederatedContext
from ray_fed.values.client_references import (
    ClientMember,
    ClientRun,
    ClientSource,
    as_run,
)
from ray_fed.worker.client_store import ClientStore
from ray_fed.worker.debugging_factory import thread_debugging_executor_factory
from tests.data import tables

ContextFactory = Callable[..., ExecutionContext]
flf = fl.framework
ROWS = fl.TensorType(np.float32, [3])
DATASET = fl.SequenceType(ROWS)
AT_CLIENTS = fl.FederatedType(DATASET, fl.CLIENTS)


@rtf.computation(DATASET, np.float32)
def total(dataset: Any, scale: Any) -> Any:
    def add(sum_so_far: Any, row: Any) -> Any:
        return sum_so_far + row * scale

    return dataset.reduce(tf.zeros(3), add)


@fl.federated_computation(AT_CLIENTS, fl.FederatedType(np.float32, fl.SERVER))
def mean_of_totals(data: Any, scale: Any) -> Any:
    pair = fl.federated_zip((data, fl.federated_broadcast(scale)))
    return fl.federated_mean(fl.federated_map(total, pair))


@fl.federated_computation(AT_CLIENTS, fl.FederatedType(np.float32, fl.SERVER))
def totals(data: Any, scale: Any) -> Any:
    pair = fl.federated_zip((data, fl.federated_broadcast(scale)))
    return fl.federated_map(total, pair)


def values_of(num_clients: int) -> list[list[Any]]:
    rng = np.random.default_rng(7)
    sizes = rng.integers(0, 9, num_clients)
    return [list(rng.normal(size=(size, 3)).astype(np.float32)) for size in sizes]


@pytest.fixture(
    params=["local", "no kernels", pytest.param("ray", marks=pytest.mark.ray)]
)
def context(request: pytest.FixtureRequest) -> ExecutionContext:
    if request.param == "ray":
        return request.getfixturevalue("ray_contexts")(workers=2, subrounds=3)
    build = request.getfixturevalue("local_contexts")
    kernels = {"enabled": request.param == "local"}
    return build(workers=2, subrounds=3, kernels=kernels)


LOCAL = pytest.mark.parametrize("context", ["local"], indirect=True)


def test_held_values_give_the_bits_of_plain_ones(context: ExecutionContext) -> None:
    clients = values_of(11)
    data = ClientData.from_values(clients, DATASET)
    cohorts = [data, data[:], data.select(range(11)), list(data)]

    for computation, by_numpy in (
        (totals, totals_by_numpy(clients, 2.0)),
        (mean_of_totals, totals_by_numpy(clients, 2.0).mean(0)),
    ):
        expected = context.invoke(computation, (clients, 2.0))
        found = [context.invoke(computation, (cohort, 2.0)) for cohort in cohorts]

        for result in found:
            np.testing.assert_array_equal(result, expected)
        np.testing.assert_allclose(expected, by_numpy, rtol=1e-4, atol=1e-6)


@rtf.computation(DATASET, DATASET)
def count_both(first: Any, second: Any) -> Any:
    def add(count: Any, row: Any) -> Any:
        return count + 1

    return second.reduce(first.reduce(np.int64(0), add), add)


@fl.federated_computation(AT_CLIENTS, AT_CLIENTS)
def count_all(first: Any, second: Any) -> Any:
    return fl.federated_sum(fl.federated_map(count_both, (first, second)))


def test_each_context_pairs_arguments_by_id(context: ExecutionContext) -> None:
    clients = values_of(3)
    data = ClientData.from_values(dict(zip("abc", clients, strict=True)), DATASET)
    programs = RayFederatedContext(context)
    debugging = flf.AsyncExecutionContext(framework.thread_debugging_executor_factory())

    def invoke_program(comp: Any, arg: Any) -> Any:
        return asyncio.run(programs.invoke(comp, arg).get_value())

    def debug(comp: Any, arg: Any) -> Any:
        return asyncio.run(debugging.invoke(comp, arg))

    for invoke in (context.invoke, invoke_program, debug):

        def count(other: Any, invoke: Any = invoke) -> Any:
            return invoke(count_all, structs.Struct([(None, data), (None, other)]))

        assert count(data[:]) == 2 * sum(map(len, clients))
        for other in (data[::-1], list(data[::-1]), [data[0], *data[:0:-1]]):
            with pytest.raises(errors.ValueMismatchError, match="same clients in an"):
                count(other)


def totals_by_numpy(clients: Any, scale: float) -> Any:
    return scale * np.array([np.sum([*rows, np.zeros(3)], axis=0) for rows in clients])


def test_a_list_that_comes_again_is_sent_once(context: ExecutionContext) -> None:
    clients = [list(np.full([2000, 3], index, np.float32)) for index in range(5)]
    is_sent = context.config.backend == "ray"

    found: list[Any] = []
    sent: list[int] = []
    for scale in (1.0, 1.0, 2.0, 2.0):
        found.append(context.invoke(totals, (clients, scale)))
        assert context.last_report is not None
        sent.append(context.last_report.bytes_sliced)
    clients[3][7][:] = 100.0
    changed = context.invoke(totals, (clients, 1.0))

    expected = totals_by_numpy(clients, 1.0)
    assert sent == [is_sent * 120_000, is_sent * 120_000, 0, 0]
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[3], 2 * np.array(found[0]))
    np.testing.assert_allclose(changed, expected)
    assert changed[3].tolist() == [6097.0] * 3


def test_loaded_values_give_the_bits_of_plain_ones(context: ExecutionContext) -> None:
    clients = dict(zip("abcdefghijk", values_of(11), strict=True))
    data = ClientData.from_function(clients, lambda name: clients[name], DATASET)
    cohort = ["k", "a", "f", "b"]

    expected = context.invoke(mean_of_totals, ([clients[c] for c in cohort], 0.5))
    found = context.invoke(mean_of_totals, (data.select(cohort), 0.5))

    np.testing.assert_array_equal(found, expected)
    by_numpy = totals_by_numpy([clients[c] for c in cohort], 0.5).mean(0)
    np.testing.assert_allclose(found, by_numpy, rtol=1e-4, atol=1e-6)


def test_each_client_is_loaded_once_by_a_worker(
    context: ExecutionContext, tmp_path: pathlib.Path
) -> None:
    clients = values_of(9)

    def load(client: int) -> Any:
        with (tmp_path / f"{client}").open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        return clients[client]

    data = ClientData.from_function(range(9), load, DATASET)
    results = [context.invoke(mean_of_totals, (data, 1.0)) for _ in range(4)]

    assert all(np.array_equal(result, results[0]) for result in results)
    runs = [(tmp_path / f"{client}").read_text().split() for client in range(9)]
    stores = 1 if context.config.backend == "ray" else 2  # of a process: one a thread
    assert all(max(collections.Counter(pids).values()) <= stores for pids in runs)


@pytest.mark.ray
def test_clients_come_back_to_the_worker_that_has_them(ray_contexts: Any) -> None:
    context = ray_contexts(workers=2, subrounds=2)
    cohorts = [ClientData.from_values(values_of(size), DATASET) for size in (9, 6)]
    pids: dict[tuple[int, int], set[int]] = {}

    for number, cohort in [*enumerate(cohorts)] * 5:
        context.invoke(mean_of_totals, (cohort, 1.0))
        for subround in context.last_report.subrounds:
            if subround.num_clients:
                key = (number, subround.subround_index)
                pids.setdefault(key, set()).add(subround.worker_pid)

    assert len(pids) == 4
    assert all(len(found) == 1 for found in pids.values())


@pytest.mark.ray
@pytest.mark.slow
def test_workers_leave_keras_to_a_function_that_imports_it(ray_contexts: Any) -> None:
    own_pool = ray_fed.Workers(count=1, client_bytes=2**28)
    context = ray_contexts(workers=own_pool)

    def look(_: int) -> Any:
        loaded = {"keras", "sklearn", "matplotlib"} & set(sys.modules)
        return [np.full(3, float(len(loaded)), np.float32)]

    def use(_: int) -> Any:
        import keras

        weights = keras.layers.Dense(3, kernel_initializer="ones")
        return [np.asarray(weights(np.ones([1, 2], np.float32)))[0]]

    found = [
        context.invoke(totals, (ClientData.from_function(range(4), load, DATASET), 1.0))
        for load in (look, use)
    ]

    np.testing.assert_array_equal(found[0], np.zeros([4, 3]))
    np.testing.assert_array_equal(found[1], np.full([4, 3], 2.0))


@LOCAL
def test_list_of_clients_may_repeat_one_and_is_of_their_type(
    context: ExecutionContext,
) -> None:
    clients = values_of(3)
    data = ClientData.from_values(clients, DATASET)

    found = context.invoke(totals, ([data[2], data[0], data[2]], 1.0))

    expected = context.invoke(totals, ([clients[2], clients[0], clients[2]], 1.0))
    np.testing.assert_array_equal(found, expected)
    numbers = ClientData.from_values([1.0, 2.0], np.float32)
    with pytest.raises(errors.ValueMismatchError, match="Expected client data of type"):
        context.invoke(mean_of_totals, (numbers, 1.0))


def test_function_that_raises_names_id_and_position(context: ExecutionContext) -> None:
    def load(client: int) -> Any:
        if client == 1:
            raise OSError("the disk is gone")
        return []

    data = ClientData.from_function([3, 2, 1], load, DATASET)

    with pytest.raises(
        errors.ComputationError,
        match=r"the client with the id 1, found .*OSError.*disk is gone.*position 2",
    ):
        context.invoke(mean_of_totals, (data, 1.0))
    assert context.invoke(totals, (data[:1], 1.0)) is not None
    wrong = ClientData.from_function([8, 9], np.float32, DATASET)
    with pytest.raises(errors.ValueMismatchError, match=r"with the id [89] to be"):
        context.invoke(mean_of_totals, (wrong, 1.0))


def raise_surrogate(client: int) -> Any:
    raise ValueError(f"bad row \udce9 of {client}")


def raise_long(client: int) -> Any:
    raise ValueError(f"{client}" + "x" * 20_000_000)


def raise_mute(client: int) -> Any:
    class MuteError(ValueError):
        def __str__(self) -> str:  # pyright: ignore[reportImplicitOverride]
            raise ValueError("no text")

    raise MuteError(client)


def return_odd(client: int) -> Any:
    class Odd:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise ValueError(f"odd \udce9 {client}")

    return [Odd()]


@pytest.mark.parametrize(
    ("load", "error", "found"),
    [
        (raise_surrogate, errors.ComputationError, r"ValueError: bad row \\udce9"),
        (raise_long, errors.ComputationError, "20,000,001 characters"),
        (raise_mute, errors.ComputationError, "raised MuteError: no message"),
        (return_odd, errors.ValueMismatchError, "Odd object"),
    ],
    ids=["lone surrogate", "long", "without a text", "surrogate in the cause"],
)
def test_failure_of_any_text_names_the_client(
    context: ExecutionContext, load: Any, error: type[Exception], found: str
) -> None:
    data = ClientData.from_function([4], load, DATASET)

    with pytest.raises(error, match=found) as caught:
        context.invoke(mean_of_totals, (data, 1.0))

    assert "the client with the id 4" in str(caught.value)
    assert len(str(caught.value).encode()) < 50_000


def map_locked(lock: Any) -> ClientData:
    def shift(row: Any) -> Any:
        with lock:
            return row + 1

    return ClientData.from_values({4: [np.zeros(3, np.float32)]}, DATASET).map(shift)


def load_locked(lock: Any) -> ClientData:
    def load(client: int) -> Any:
        with lock:
            return [np.full(3, client, np.float32)]

    return ClientData.from_function([4], load, DATASET)


def name_locked(lock: Any) -> ClientData:
    return ClientData.from_function([lock], lambda _: [np.zeros(3)], DATASET)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("build", "found"),
    [(load_locked, "load"), (map_locked, "shift"), (name_locked, "lambda")],
    ids=["load", "map", "ids"],
)
def test_what_cannot_travel_is_refused_in_words(
    ray_contexts: ContextFactory, build: Any, found: str
) -> None:
    context = ray_contexts(workers=2, subrounds=3)

    message = rf"can be pickled.*, found `<function .*{found}.*: cannot pickle '.*lock'"
    with pytest.raises(errors.UnsupportedError, match=message) as caught:
        context.invoke(mean_of_totals, (build(threading.Lock()), 1.0))

    assert len(str(caught.value)) < 500
    shown = "".join(traceback.format_exception(caught.value))
    assert "Serializability" not in shown  # of Ray's own page


LOADER = """
def load(client):
    return [[client] * 3]
def shift(row):
    return row + 1
"""


@pytest.mark.ray
def test_a_module_that_workers_lack_is_named(
    ray_contexts: ContextFactory,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = ray_contexts(workers=2, subrounds=2)
    (tmp_path / "clinic_loader.py").write_text(LOADER)
    monkeypatch.syspath_prepend(tmp_path)
    clinic = importlib.import_module("clinic_loader")
    rows = [np.zeros(3, np.float32)]

    for build in (
        lambda: ClientData.from_function([1, 2], clinic.load, DATASET),
        lambda: ClientData.from_function([1], lambda i: [*clinic.load(i)], DATASET),
        lambda: ClientData.from_values({4: rows}, DATASET).map(clinic.shift),
    ):
        message = r"the module `clinic_loader`.*node `.*runtime_env=.*working_dir"
        with pytest.raises(errors.UnsupportedError, match=message):
            context.invoke(mean_of_totals, (build(), 1.0))


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (
            {"batch_size": None},
            r": make batches .* by `data.batch\(32\)`, or .*_size`\.$",
        ),
        ({"y": None}, ": name the column of labels as `y`."),
        (
            {"x": ["c", "c"]},
            r': cast .* `x` to float32 by .*np\.float32\}`, .*\.astype\("float32"\)`\.',
        ),
        (
            {"y": "n"},
            r"cast the columns of `y` to int32 .*`label_type=.*np\.int64, \[None\]\)`",
        ),
        (
            {"y": ["y"]},
            r"a list of one column has .*`label_type=.*np\.int32, \[None, 1\]\)`",
        ),
        ({"x": ["s", "s"]}, r"`x` has strings, .*`keras\.layers\.StringLookup`\."),
        (
            {"y": "s"},
            r"labels are strings: .*`pandas.*cat\.codes`, in the expected dtype\.",
        ),
        ({}, None),
    ],
)
def test_types_that_differ_say_what_to_type(
    options: dict[str, Any], advice: str | None
) -> None:
    table: dict[str, Any] = {
        "who": [1, 1],
        "a": np.ones(2, np.float32),
        "c": np.ones(2),
        "y": np.zeros(2, np.int32),
        "n": [0, 1],
        "s": ["u", "v"],
    }
    given: dict[str, Any] = {"x": ["a", "a"], "y": "y", "batch_size": 2} | options
    data = ClientData.from_table(table, client="who", **given)
    batch = fl.StructWithPythonType(
        [
            ("x", fl.TensorType(np.float32, [None, 2])),
            ("y", fl.TensorType(np.int32, [None])),
        ],
        dict,
    )

    if advice is None:
        assert as_run(data, fl.SequenceType(batch)) is not None
        return
    with pytest.raises(errors.ValueMismatchError, match=advice):
        as_run(data, fl.SequenceType(batch))


def test_debugging_stack_reads_clients_too() -> None:
    clients = values_of(3)
    factory = thread_debugging_executor_factory()
    context = flf.SyncExecutionContext(factory)
    data = ClientData.from_values(clients, DATASET)

    found = context.invoke(totals, (data, np.float32(1.0)))

    expected = context.invoke(totals, (clients, np.float32(1.0)))
    np.testing.assert_array_equal(found, expected)


def test_references_tell_ids_and_weights() -> None:
    data = ClientData.from_values({"a": [[1.0] * 3] * 4, "b": []}, DATASET)

    assert [(client.id, client.weight) for client in data] == [("a", 4.0), ("b", 0.0)]
    assert data[1:].ids == ("b",)
    assert data.select(["b", "a", "b"]).ids == ("b", "a", "b")
    assert len(data.select([])) == 0


def from_ids(ids: Any, load: Any = list, type_spec: Any = DATASET, **more: Any) -> Any:
    return ClientData.from_function(ids, load, type_spec, **more)


def from_values(values: Any, **more: Any) -> Any:
    return ClientData.from_values(values, DATASET, **more)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: from_values([[1.0]]), "element 0 of the data of the client with"),
        (lambda: from_values([[]], weights=[1.0, 2.0]), "weight for each of 1 clients"),
        (lambda: from_values([[]], weights=[-1.0]), r"of at least 0, found `-1\.0`"),
        (lambda: from_values([[]])["a"], r"ids of these 1 clients, found \['a'\]"),
        (lambda: from_values([[]]).select([3]), r"ids of these 1 clients, found \[3\]"),
        (lambda: from_values([[]] * 3).select([True, False]), "of a mask, pass the id"),
        (lambda: from_values([[]] * 3).select(np.array([1.0])), "of a mask, pass the"),
        (lambda: from_values([[]] * 3)[True], "of a mask, pass the ids"),
        (
            lambda: from_values([[]] * 3).pick([True, False]),
            "whole numbers from 0 to 2",
        ),
        (lambda: from_values([[]] * 3).pick([1.5]), "whole numbers from 0 to 2"),
        (lambda: from_values([[]] * 3).pick([-1]), "whole numbers from 0 to 2"),
        (lambda: from_ids("ab", weights=[1.0]), "one weight for each of 2 clients"),
        (lambda: from_ids([1, (2, [3])]), r"can be hashed, .* found `\(2, \[3\]\)`"),
        (
            lambda: from_ids("abab"),
            "a different id for each .*found `'a'` .* 2 times",
        ),
        (lambda: from_ids(None), "`ids`, one for each client, found None"),
        (lambda: from_ids([0], 3), "a function as `load`, found 3"),
        *(
            (
                lambda type_spec=type_spec: from_ids([0], list, type_spec),
                "the type of one client's value, .* as `type_spec`, found",
            )
            for type_spec in (None, fl.FunctionType(None, np.float32), AT_CLIENTS)
        ),
    ],
)
def test_bad_input_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(errors.UserError, match=message):
        build()


def test_weights_are_finite_numbers() -> None:
    for weight in (float("nan"), float("inf"), 10**400, "2", None, True, [1.0]):
        with pytest.raises(errors.UserError, match=r"finite numbers as .* id 'bob'"):
            from_ids(["ann", "bob"], weights=[1.0, weight])


def test_values_without_end_are_refused_at_once() -> None:
    for values in (itertools.repeat(1.0), itertools.count(1.0), itertools.cycle([1])):
        with pytest.raises(
            errors.ValueMismatchError, match=r"id 'a' to end, found itertools\.\w+ with"
        ):
            ClientData.from_values({"a": values}, fl.SequenceType(np.float32))


def test_values_have_the_bound_of_the_installed_context(
    local_contexts: ContextFactory,
) -> None:
    plain: Any = local_contexts(data={"sequence_bytes": 4000})
    floats = fl.SequenceType(np.float32)

    for context in (plain, RayFederatedContext(plain)):
        with fl.framework.get_context_stack().install(context):
            data = ClientData.from_values({"a": itertools.repeat(1.0, 1000)}, floats)
            with pytest.raises(
                errors.ValueMismatchError, match=r"4000 bytes.*`data\.sequence_bytes`"
            ):
                ClientData.from_values({"a": itertools.repeat(1.0, 1001)}, floats)

        assert data.weights is not None
        assert data.weights.tolist() == [1000.0]


@pytest.mark.ray
def test_source_is_put_once_and_freed_with_its_last_holder(
    ray_contexts: ContextFactory, ray_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ray_contexts(workers=2, subrounds=3)
    put: list[Any] = []
    put_value = ray.put

    def noting(value: Any, **options: Any) -> Any:
        put.append(type(value).__name__)
        return put_value(value, **options)

    monkeypatch.setattr(ray, "put", noting)
    vector = fl.TensorType(np.float32, [200_000])
    clients = [np.full([200_000], i, np.float32) for i in range(6)]
    data = ClientData.from_values(clients, vector)

    @fl.federated_computation(fl.FederatedType(vector, fl.CLIENTS))
    def mean(values: Any) -> Any:
        return fl.federated_mean(values)

    gc.collect()
    before = ray_memory.stored_bytes()
    for _ in range(3):
        np.testing.assert_array_equal(context.invoke(mean, data)[:2], [2.5, 2.5])
    held = ray_memory.stored_bytes()
    del data
    gc.collect()
    context.invoke(mean, [np.zeros([200_000], np.float32)])  # workers hear of it

    assert put[:2] == ["list", "_ChunkedSource"]
    assert held - before > 6 * 800_000
    assert ray_memory.settle(ray_memory.stored_bytes, before) <= before


class Lost(ClientSource):
    """Clients that this process cannot open, as it lacks the module of their ids."""

    token, is_resident, opens_once = "lost", False, True

    @override
    def read(self, position: int) -> Any:
        raise NotImplementedError(position)

    @override
    def opened(self) -> ClientSource:
        raise errors.UnsupportedError("no such module")


class TestClientStore:
    def test_keeps_no_more_than_it_may(self) -> None:
        loads: list[int] = []

        def load(client: int) -> Any:
            loads.append(client)
            return np.zeros([10], np.float32)

        data = ClientData.from_function(range(3), load, fl.TensorType(np.float32, [10]))
        store = ClientStore(max_bytes=80)  # two of them

        for position in (0, 1, 0, 2, 0, 1):
            store.read(data[position])

        assert loads == [0, 1, 2, 1]

    def test_keeps_what_is_asked_for_again(self) -> None:
        store, made = ClientStore(max_bytes=100), list[str]()

        def ask(key: str) -> str:
            def make() -> str:
                made.append(key)
                return key

            if not store.is_repeated(key):
                return make()
            return store.keep(key, frozenset(), make, len)

        assert [ask(key) for key in "abaca"] == list("abaca")
        assert made == list("abac")
        assert store.kept.weight == 1

    def test_hands_out_what_is_too_large_to_keep(self) -> None:
        data = ClientData.from_function(
            [0], lambda _: np.zeros([10], np.float32), fl.TensorType(np.float32, [10])
        )
        store = ClientStore(max_bytes=4)

        assert store.read(data[0]).shape == (10,)
        assert store.count_bytes(data) == 40

    def test_measures_and_reads_what_is_no_run(self) -> None:
        store = ClientStore(max_bytes=100)

        assert store.count_bytes([np.zeros(3, np.float32)]) == 12
        assert store.read_all([1, 2]) == [1, 2]

    def test_forgets_what_cannot_be_opened(self) -> None:
        store = ClientStore(max_bytes=100)
        lost = Lost()
        with pytest.raises(errors.UnsupportedError):
            store.read(ClientMember(lost, 0))

        store.forget([lost.token])

        other = ClientData.from_function([1], lambda i: i, np.int32)
        assert store.read(other[0]) == 1

    @pytest.mark.parametrize("end", ["close", "forget", "the source is gone"])
    def test_drops_all_in_the_end(self, end: str) -> None:
        vector = fl.TensorType(np.float32, [10])

        def load(_: int) -> Any:
            return np.zeros([10], np.float32)

        data = ClientData.from_function(range(2), load, vector)
        other = ClientData.from_function(range(2), load, vector)
        store = ClientStore(max_bytes=1000)
        for position in range(2):
            store.read(data[position])
            store.read(other[position])
        assert store.kept.weight == 160

        if end == "close":
            store.close()
            assert store.kept.weight == 0
            return
        if end == "forget":
            store.forget([data.source.token])
        else:
            del data
            gc.collect()
            store.read(other[0])

        assert store.kept.weight == 80


def test_run_is_cut_without_being_read() -> None:
    data = ClientData.from_function(range(5), lambda _: 1 / 0, DATASET)

    run = ClientRun(data.source, data.type_signature, data.positions)[1:4]

    assert list(run.positions) == [1, 2, 3]


WHO = ["b", "a", "b", "c"]
TABLE = {"who": WHO, "x": np.arange(4.0), "y": [1, 2, 3, 4]}


def test_one_client_goes_by_its_id_and_a_number_is_a_place() -> None:
    data = ClientData.from_table(TABLE, client="who", x="x")

    assert data["b"].id == data[1].id == "b"
    assert data[np.int64(2)].id == "c"
    with pytest.raises(errors.ConfigError, match=r"ids of these 3 clients, .*'d'"):
        data["d"]


def test_a_client_is_read_to_look_at_it() -> None:
    member = fl.SequenceType([("x", np.float32), ("y", np.int32)])
    rows = [{"x": np.float32(1.5), "y": np.int32(0)}] * 2
    data = ClientData.from_values({"anna": rows, "bert": []}, member)

    assert data.read("anna") == rows
    assert data.read(1) == []
    assert repr(data["anna"]) == "<client 'anna': <x=float32,y=int32>*>"


def test_one_id_is_no_list_of_ids() -> None:
    data = ClientData.from_values({"anna": 1}, np.int32)

    with pytest.raises(errors.ConfigError, match="Expected a list of ids, found 'anna"):
        data.select("anna")
    number: Any = 1
    with pytest.raises(errors.ConfigError, match="Expected `ids`, one for each client"):
        data.select(number)


def test_an_unknown_id_names_the_nearest_one() -> None:
    data = ClientData.from_table({"who": ["st-010"], "x": [1.0]}, client="who", x="x")

    with pytest.raises(errors.ConfigError, match="Did you mean `st-010`") as caught:
        data["st-100"]
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 1


def test_filter_leaves_clients_with_so_many_rows() -> None:
    data = ClientData.from_table(TABLE, client="who", x="x").epochs(3).batch(2)

    for min_rows in range(4):
        wanted = [who for who in "abc" if WHO.count(who) >= min_rows]
        assert list(data.filter(min_rows=min_rows).ids) == wanted
    assert list(data.take(1).filter(min_rows=2).ids) == []
    with pytest.raises(errors.ConfigError, match="known, as `filter` needs"):
        ClientData.from_function("ab", list, DATASET).filter(min_rows=1)


def _twice(row: Any) -> Any:
    return {"x": row["x"] * 2}


def test_clients_of_several_sources_are_those_of_one(
    tmp_path: pathlib.Path, context: ExecutionContext
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"who": ["z", "z"], "x": [7.0, 8.0]}), tmp_path / "t")
    first = ClientData.from_table(TABLE, client="who", x="x")
    second = ClientData.from_parquet(tmp_path / "t", client="who", x="x")
    mapped = first.select(["a"]).map(_twice)
    mapped = mapped.concat(second.map(_twice)).batch(2)

    held = first.select(["c", "b"]).concat(
        ClientData.from_table({"who": ["d"], "x": [9.0]}, client="who", x="x")
    )
    mixed = first.batch(2).concat(second.batch(2)).shuffle(seed=1)

    assert [(c.id, c.weight) for c in held] == [("c", 1.0), ("b", 2.0), ("d", 1.0)]
    assert [row[0] for row in held["b"].read()] == [0.0, 2.0]
    assert list(mixed.ids) == ["a", "b", "c", "z"]
    assert sorted(mixed["z"].read().columns[0].rows.tolist()) == [7.0, 8.0]
    assert mixed.type_signature == first.batch(2).type_signature
    assert [c.read().columns[0].rows.tolist() for c in mapped] == [[2.0], [14.0, 16.0]]

    def add(so_far: Any, batch: Any) -> Any:
        return so_far + tf.reduce_sum(batch["x"])

    total_of_all = tables.sum_over_clients(mapped, np.float64(0), add)
    assert context.invoke(total_of_all, mapped) == 32.0
    assert context.invoke(total_of_all, mixed) == 21.0


def test_clients_that_do_not_go_together_are_not_joined() -> None:
    data = ClientData.from_table(TABLE, client="who", x="x")
    other = ClientData.from_table(TABLE, client="who", x="y")

    with pytest.raises(errors.ConfigError, match="a different id for each"):
        data.concat(data)
    with pytest.raises(errors.ValueMismatchError, match="of one type, found `<x=float"):
        data.concat(other)
    with pytest.raises(errors.ValueMismatchError, match="different ones: call these"):
        data.concat(data.take(1))
