"""What `RayFederatedContext` takes and returns, local and on real Ray."""

import asyncio
import collections
import copy
import gc
import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import federated_language as fl
import numpy as np
import pytest
import tree
from ray._private import worker as ray_worker
from typing_extensions import override

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.program import RayFederatedContext, RayValueReference

import tensorflow as tf  # isort: skip

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.float32, fl.SERVER)


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture
def context(local_contexts: Any) -> Iterator[RayFederatedContext]:
    """A context on threads of this process, installed."""
    with RayFederatedContext(local_contexts(workers=2)) as context:
        fl.framework.set_default_context(context)
        yield context


def read(structure: Any) -> Any:
    return asyncio.run(fl.program.materialize_value(structure))


@rtf.computation(np.float32, np.float32)
def add(x: Any, y: Any) -> Any:
    return x + y


@rtf.computation
def make_vector() -> Any:
    return tf.range(1, 4)


USES: dict[str, Any] = {
    "vector[0] == 1": True,
    "vector[0] != 1": False,
    "(vector == [1, 0, 3]).tolist()": [True, False, True],
    "(vector < 2).sum()": 1,
    "(1 + vector * 2 - vector).tolist()": [2, 3, 4],
    "(vector % 2).tolist()": [1, 0, 1],
    "(vector + vector).tolist()": [2, 4, 6],
    "np.sum(vector)": 6,
    "vector.mean()": 2,
    "(vector.shape, vector.dtype, vector.ndim)": ((3,), np.dtype(np.int32), 1),
    "(len(vector), [int(each) for each in vector])": (3, [1, 2, 3]),
    "vector.numpy()[1:].tolist()": [2, 3],
    "int(tf.reduce_sum(vector))": 6,
    "(tf.ones(3, tf.int32) + vector).numpy().tolist()": [2, 3, 4],
    "vector in {vector: 0}": True,
}


@pytest.mark.parametrize("use", USES)
def test_a_reference_is_used_as_an_array(
    context: RayFederatedContext, use: str
) -> None:
    vector = context.invoke(make_vector)

    assert eval(use, {**globals(), "vector": vector}) == USES[use]


def test_a_reference_is_used_as_a_number(context: RayFederatedContext) -> None:
    number = context.invoke(add, (1.0, 2.0))
    again = number
    again += 1

    assert (int(number), float(number), complex(number)) == (3, 3.0, 3 + 0j)
    assert (f"{number:.1f}", str(number), round(number)) == ("3.0", "3.0", 3)
    assert (again, bool(number - 3)) == (4, False)
    assert repr(number) == "<reference to float32, kept>"
    with pytest.raises(AttributeError, match="found `weights`"):
        _ = number.weights


def test_a_copy_of_a_reference_is_the_value(context: RayFederatedContext) -> None:
    vector = context.invoke(make_vector)

    for copied in (
        copy.copy(vector),
        copy.deepcopy({"vector": vector})["vector"],
        pickle.loads(pickle.dumps(vector)),
    ):
        assert isinstance(copied, np.ndarray)
        np.testing.assert_array_equal(copied, vector.numpy())


def test_what_is_read_cannot_be_written_to(context: RayFederatedContext) -> None:
    vector = context.invoke(make_vector)

    for array in (vector.numpy(), np.asarray(vector)):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


@rtf.computation(np.float32)
def slowly(x: Any) -> Any:
    total = x
    for _ in tf.range(50_000):
        total = total + 1.0
    return total - 50_000.0


@rtf.computation(np.float32)
def below_ten(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_less(x, 10.0)]):
        return tf.identity(x)


@fl.federated_computation(AT_SERVER, AT_CLIENTS)
def add_sum(state: Any, values: Any) -> Any:
    checked = fl.federated_map(below_ten, values)
    return fl.federated_map(add, (state, fl.federated_sum(checked)))


@fl.federated_computation(AT_SERVER)
def add_slowly(state: Any) -> Any:
    return fl.federated_map(add, (state, fl.federated_map(slowly, state)))


@rtf.computation
def draw() -> Any:
    return tf.random.normal([3])


def test_call_of_a_number_draws_by_it_and_counts_no_call(
    context: RayFederatedContext,
) -> None:
    counted = [read(context.invoke(draw)).tolist() for _ in range(2)]

    numbered = [read(context.invoke_at(n, draw)).tolist() for n in (1, 0, 7)]

    assert numbered[:2] == counted[::-1]
    assert numbered[2] not in counted
    assert context.num_invocations == 2
    with pytest.raises(errors.CardinalityError):
        context.invoke_at(-1, draw)


def test_numpy_reads_a_reference(context: RayFederatedContext) -> None:
    reference = context.invoke(add, (1.0, 2.5))

    array = np.asarray(reference)

    assert (array.dtype, array.shape, float(array)) == (np.float32, (), 3.5)
    assert np.asarray(reference, np.float64).dtype == np.float64


@pytest.mark.claim("federated_context.01", "federated_context.02")
def test_implements_the_interface(context: RayFederatedContext) -> None:
    interface: Any = fl.program.FederatedContext

    assert interface.__abstractmethods__ == {"invoke"}
    assert isinstance(context, interface)
    assert isinstance(context, fl.framework.SyncContext)


class Selection:
    """What a data source may select: opaque, but for its length and its clients."""

    def __init__(self, clients: list[Any]) -> None:
        self._clients = clients

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._clients)


class Source(fl.program.FederatedDataSource, fl.program.FederatedDataSourceIterator):
    """A data source and its iterator: one number a client, from 1 on."""

    def __init__(self) -> None:
        self._next = 1

    @property
    @override
    def federated_type(self) -> fl.FederatedType:
        return AT_CLIENTS

    @override
    def iterator(self) -> "Source":
        return self

    @override
    def select(self, k: int | None = None) -> Any:
        first, self._next = self._next, self._next + (k or 1)
        return Selection([float(client) for client in range(first, self._next)])

    @override
    def to_bytes(self) -> bytes:
        return str(self._next).encode()

    @classmethod
    @override
    def from_bytes(cls, buffer: bytes) -> "Source":
        source = cls()
        source._next = int(buffer)
        return source


@pytest.mark.claim("federated_context.06", "federated_context.18")
def test_clients_are_opaque_objects_that_a_data_source_selects(
    context: RayFederatedContext,
) -> None:
    @fl.federated_computation(AT_SERVER, [AT_CLIENTS, AT_CLIENTS])
    def add_sums(state: Any, values: Any) -> Any:
        total = fl.federated_map(add, (fl.federated_sum(values[0]), state))
        return fl.federated_map(add, (total, fl.federated_sum(values[1])))

    selections = Source().iterator()

    first = add_sum(0.0, selections.select(2))
    second = add_sums(first, [selections.select(3), selections.select(3)])

    assert read([first, second]) == [3.0, 3.0 + 12.0 + 21.0]


@pytest.mark.claim("federated_context.18")
@pytest.mark.parametrize(
    "clients",
    [
        lambda: iter([1.0]),
        lambda: {1.0},
        lambda: {"anna": 1.0},
        lambda: np.ones(2, np.float32),
        lambda: tf.constant([1.0]),
        lambda: tf.data.Dataset.from_tensor_slices([1.0]),
        object,
        lambda: Selection(["x"]),
    ],
    ids=["iterator", "set", "mapping", "array", "tensor", "dataset", "object", "type"],
)
def test_other_objects_are_no_clients(
    context: RayFederatedContext, clients: Any
) -> None:
    with pytest.raises(TypeError, match=r"^Expected the argument"):
        context.invoke(add_sum, (0.0, clients()))


def test_what_is_not_taken_is_a_type_error(context: RayFederatedContext) -> None:
    callers: list[Any] = [context, context.execution_context]

    for caller in callers:
        for comp in (3, None, "text", len, fl.FederatedType):
            with pytest.raises(TypeError, match="a MergeableCompForm or a computation"):
                caller.invoke(comp, [1.0])
        with pytest.raises(TypeError, match="Expected no argument"):
            caller.invoke(no_argument, 3)


def test_invocations_are_counted_in_whole_numbers(context: RayFederatedContext) -> None:
    for number, error in ((-1, ValueError), (1.5, TypeError), ("2", TypeError)):
        given: Any = number
        with pytest.raises(error, match="`num_calls`"):
            context.resume_at(given)
    with pytest.raises(TypeError, match="`num_calls`"):
        context.resume_at(True)


@pytest.mark.claim("federated_context.20")
def test_argument_is_optional(context: RayFederatedContext) -> None:
    values = [context.invoke(no_argument), context.invoke(no_argument, None)]

    assert read(values) == [1.0, 1.0]


@rtf.computation
def structured() -> Any:
    return collections.OrderedDict(
        by_name=collections.OrderedDict(b=1.0, a=2.0),
        in_order=(3.0, [4.0, 5.0]),
        pair=Pair(6.0, collections.OrderedDict(x=7.0)),
    )


@pytest.mark.claim(
    "federated_context.07",
    "federated_context.08",
    "federated_context.15",
    "federated_context.21",
)
def test_result_is_references_in_the_containers_of_its_type(
    context: RayFederatedContext,
) -> None:
    result = structured()

    leaves = [
        *result["by_name"].values(),
        result["in_order"][0],
        *result["in_order"][1],
        result["pair"].first,
        result["pair"].second["x"],
    ]
    assert all(isinstance(leaf, RayValueReference) for leaf in leaves)
    assert {leaf.type_signature for leaf in leaves} == {fl.TensorType(np.float32)}
    value = read(result)
    assert value == collections.OrderedDict(
        by_name=collections.OrderedDict(b=1.0, a=2.0),
        in_order=(3.0, [4.0, 5.0]),
        pair=Pair(6.0, collections.OrderedDict(x=7.0)),
    )
    assert isinstance(value["pair"], Pair)
    assert isinstance(value["in_order"][1], list)


NAMED = fl.StructType([("b", np.float32), ("a", np.float32)])
UNNAMED = fl.StructType([np.float32, np.float32])
BY_NAME = collections.OrderedDict(b=1.0, a=2.0)


@pytest.mark.claim(
    "federated_context.11",
    "federated_context.14",
    "federated_context.16",
    "federated_context.17",
)
@pytest.mark.parametrize(
    ("type_spec", "expected", "arg"),
    [
        pytest.param(NAMED, BY_NAME, BY_NAME, id="all named"),
        pytest.param(NAMED, BY_NAME, {"a": 2.0, "b": 1.0}, id="all named, of a dict"),
        pytest.param(NAMED, BY_NAME, (1.0, 2.0), id="all named, of a tuple"),
        pytest.param(UNNAMED, (1.0, 2.0), (1.0, 2.0), id="unnamed"),
        pytest.param(UNNAMED, (1.0, 2.0), [1.0, 2.0], id="unnamed, of a list"),
    ],
)
def test_struct_without_a_container(
    context: RayFederatedContext, type_spec: fl.Type, expected: Any, arg: Any
) -> None:
    """The container follows from the type, whatever container the argument has."""

    @fl.federated_computation(fl.FederatedType(type_spec, fl.SERVER))
    def same(value: Any) -> Any:
        return value

    result = context.invoke(same, arg)

    assert type(result) is type(expected)
    assert read(result) == expected


@pytest.mark.claim("federated_context.13")
def test_strings_and_sequences(context: RayFederatedContext) -> None:
    @rtf.computation(fl.SequenceType(np.int32), np.str_)
    def double(values: Any, text: Any) -> Any:
        doubled: Any = values.map(lambda x: x * 2)  # pyright: ignore[reportUnknownLambdaType]
        return doubled, text + "!"

    sequence, text = double([1, 2, 3], "ab")
    again, _ = double(sequence, text)

    assert sequence.type_signature == fl.SequenceType(np.int32)
    assert read(text) == b"ab!"
    assert read([sequence]) == [[2, 4, 6]]
    assert read([again]) == [[4, 8, 12]]


def test_result_without_values_is_an_empty_container(
    context: RayFederatedContext,
) -> None:
    @fl.federated_computation
    def nothing() -> Any:
        return ()

    assert context.invoke(nothing) == ()


@pytest.mark.claim(
    "federated_context.03",
    "federated_context.09",
    "federated_context.10",
    "federated_context.22",
)
@pytest.mark.parametrize(
    ("parameter", "arg"),
    [
        pytest.param(AT_CLIENTS, [1.0], id="at clients"),
        pytest.param([AT_SERVER, AT_CLIENTS], (1.0, [1.0]), id="some at clients"),
        pytest.param(
            fl.FederatedType(np.float32, fl.CLIENTS, all_equal=True),
            1.0,
            id="equal at clients",
        ),
        pytest.param(fl.FunctionType(None, np.float32), add, id="a function"),
        pytest.param(
            fl.StructType([("a", np.float32), np.float32]),
            (1.0, 2.0),
            id="half named",
        ),
    ],
)
def test_other_results_are_refused_before_anything_runs(
    context: RayFederatedContext, parameter: Any, arg: Any
) -> None:
    def same(value: Any) -> Any:
        return value

    with pytest.raises(ValueError, match=r"Expected a result|mix of named"):
        context.invoke(fl.federated_computation(same, parameter), arg)
    assert context.num_invocations == 0


@rtf.computation(np.float32)
def triple(x: Any) -> Any:
    return x * 3.0


@fl.federated_computation(
    fl.FunctionType(np.float32, np.float32), AT_SERVER, AT_CLIENTS
)
def add_sum_of(function: Any, state: Any, values: Any) -> Any:
    total = fl.federated_sum(fl.federated_map(function, values))
    return fl.federated_map(add, (state, fl.federated_map(function, total)))


@pytest.mark.claim("federated_context.19")
def test_functions_are_arguments_too(context: RayFederatedContext) -> None:
    first = add_sum_of(triple, 1.0, [1.0, 2.0])
    second = context.invoke(add_sum_of, (triple, first, [1.0]))

    assert read([first, second]) == [28.0, 37.0]
    plainly = context.execution_context.invoke(add_sum_of, (triple, 1.0, [1.0, 2.0]))
    assert plainly == 28.0


@fl.federated_computation
def no_argument() -> Any:
    return fl.federated_value(np.float32(1), fl.SERVER)


@pytest.mark.claim("federated_context.03", "federated_context.04")
@pytest.mark.parametrize(
    ("comp", "arg", "message"),
    [
        pytest.param(add_sum, (np.int32(1), [1.0]), "float32", id="plain value"),
        pytest.param(add_sum, ("int", [1.0]), "found `int32`", id="reference"),
        pytest.param(
            add_sum,
            ("float", ["float"]),
            "reference to float32",
            id="reference among clients",
        ),
        pytest.param(
            add_sum,
            ("float", "float"),
            "a value for each client",
            id="reference as clients",
        ),
        pytest.param(add_sum, ("float",), "2 elements", id="too few"),
        pytest.param(no_argument, "float", "no argument", id="none is taken"),
    ],
)
def test_arguments_are_checked_at_once(
    context: RayFederatedContext,
    comp: Any,
    arg: Any,
    message: str,
) -> None:
    @rtf.computation
    def values() -> Any:
        return {"int": tf.constant(1), "float": tf.constant(1.0)}

    references = values()

    def replace(name: Any) -> Any:
        return references.get(name, name) if isinstance(name, str) else name

    arg = tree.map_structure(replace, arg)

    with pytest.raises(TypeError, match=message):
        context.invoke(comp, arg)


@pytest.mark.claim("federated_context.07", "federated_context.12")
def test_invoke_returns_at_once_and_takes_what_is_not_there_yet(
    context: RayFederatedContext,
) -> None:
    state: Any = 1.0
    started = time.monotonic()
    for _ in range(5):
        state = add_slowly(state)
    returned = time.monotonic() - started

    value = read(state)

    assert value == 32.0
    assert returned < (time.monotonic() - started) / 2


@pytest.mark.claim("federated_context.04", "federated_context.05")
def test_references_and_plain_values_mix_in_one_struct(
    context: RayFederatedContext,
) -> None:
    vector = fl.TensorType(np.float32, [50_000])
    pair = fl.StructType([("x", vector), ("y", vector)])

    @rtf.computation
    def ones() -> Any:
        return tf.ones([50_000])

    @rtf.computation(pair, np.float32)
    def work(pair: Any, scale: Any) -> Any:
        return tf.reduce_sum(pair["x"] - pair["y"]) * scale

    @fl.federated_computation(fl.FederatedType(pair, fl.SERVER), AT_CLIENTS)
    def differences(pair: Any, scales: Any) -> Any:
        placed = fl.federated_broadcast(pair)
        return fl.federated_sum(fl.federated_map(work, (placed, scales)))

    halves = np.full(50_000, 0.5, np.float32)

    total = differences({"x": ones(), "y": halves}, [1.0, 2.0, 3.0])

    assert read(total) == 150_000.0


def test_failure_is_located_and_reaches_those_who_depend_on_it(
    context: RayFederatedContext,
) -> None:
    failed = add_sum(0.0, [1.0, 2.0, 11.0, 3.0])
    dependent = add_slowly(failed)
    fine = add_sum(0.0, [1.0, 2.0])

    for reference in (failed, dependent):
        with pytest.raises(
            errors.ComputationError, match="client at position 2"
        ) as caught:
            read(reference)
        assert caught.value.location.client_index == 2
    assert read(fine) == 3.0


def read_failed() -> tuple[Any, errors.ComputationError, list[str]]:
    """Return the reference of a failed call, its error, and the error as shown."""
    failed = add_sum(0.0, [1.0, 2.0, 11.0, 3.0])
    with pytest.raises(errors.ComputationError) as caught:
        read(failed)
    return failed, caught.value, traceback.format_exception(caught.value)


@pytest.mark.usefixtures("context")
def test_calls_that_take_a_failed_value_leave_its_error_as_it_was_shown() -> None:
    failed, error, shown = read_failed()

    dependent = [add_slowly(failed), add_slowly(failed)]
    deadline = time.monotonic() + 60
    while not all("failed" in repr(reference) for reference in dependent):
        assert time.monotonic() < deadline, dependent
        threading.Event().wait(0.01)

    assert traceback.format_exception(error) == shown


def test_failed_value_that_is_read_again_leaves_its_error_as_it_was_shown(
    context: RayFederatedContext,
) -> None:
    failed, error, shown = read_failed()

    for _ in range(2):
        with pytest.raises(errors.ComputationError) as again:
            context.read([failed, failed]).result()
        assert str(again.value) == str(error)
        assert again.value.location == error.location

    assert traceback.format_exception(error) == shown


def test_wrong_number_of_clients_is_told_by_the_result(
    context: RayFederatedContext,
) -> None:
    @fl.federated_computation(AT_CLIENTS, AT_CLIENTS)
    def total(x: Any, y: Any) -> Any:
        return fl.federated_sum(fl.federated_map(add, (x, y)))

    result = total([1.0], [1.0, 2.0])

    with pytest.raises(errors.CardinalityError, match="the same number of values"):
        read(result)


def test_release_manager_of_federated_language(context: RayFederatedContext) -> None:
    manager: Any = fl.program.MemoryReleaseManager()

    async def program() -> None:
        for index in range(3):
            await manager.release({"sum": add_sum(1.0, [float(index)])}, index)

    asyncio.run(program())

    assert manager.values() == {0: {"sum": 1.0}, 1: {"sum": 2.0}, 2: {"sum": 3.0}}


def test_interrupted_read_leaves_the_value(context: RayFederatedContext) -> None:
    result = add_slowly(1.0)

    async def interrupt() -> None:
        reading = asyncio.ensure_future(result.get_value())
        await asyncio.sleep(0)
        reading.cancel()
        await reading

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupt())

    assert read(result) == 2.0


def test_many_may_read_at_once_from_any_thread(context: RayFederatedContext) -> None:
    result = add_slowly(1.0)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(read([result, result])))
        for _ in range(3)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [[2.0, 2.0]] * 3


class _Elsewhere(fl.program.MaterializableValueReference):
    """A reference that another platform made."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @property
    @override
    def type_signature(self) -> fl.TensorType:
        return fl.TensorType(np.float32)

    @override
    async def get_value(self) -> Any:
        return self._value


def test_reference_of_another_platform_is_read(context: RayFederatedContext) -> None:
    assert read(add_sum(_Elsewhere(np.float32(2)), [1.0])) == 3.0


def test_reference_that_lies_about_its_type_is_told(
    context: RayFederatedContext,
) -> None:
    result = add_sum(_Elsewhere(np.int32(2)), [1.0])

    with pytest.raises(TypeError, match="a referenced value"):
        read(result)


def test_arrays_are_read_only(context: RayFederatedContext) -> None:
    @rtf.computation
    def ones() -> Any:
        return tf.ones([3])

    with pytest.raises(ValueError, match="read-only"):
        read(ones())[0] = 7


def test_value_is_let_go_with_its_last_holder(
    context: RayFederatedContext,
) -> None:
    @rtf.computation
    def ones() -> Any:
        return {"kept": tf.ones([1000]), "dropped": tf.ones([1000])}

    async def hold(reference: RayValueReference) -> weakref.ref[Any]:
        return weakref.ref(await reference.take())

    result = ones()
    gc.disable()  # values must not wait for the collector of cycles
    try:
        dropped = asyncio.run(hold(result["dropped"]))
        kept = asyncio.run(hold(result["kept"]))
        metrics = result.pop("kept")
        del result
        deadline = time.monotonic() + 10
        while dropped() is not None and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert dropped() is None
        assert kept() is not None
        assert read(metrics).sum() == 1000.0
    finally:
        gc.enable()


def test_draws_follow_the_order_of_invocations(
    local_contexts: Any, context: RayFederatedContext
) -> None:
    @rtf.computation(np.float32)
    def draw(x: Any) -> Any:
        return x * 0.0 + tf.random.uniform([])

    with local_contexts(workers=2) as plain_context:
        expected = [plain_context.invoke(draw, 1.0) for _ in range(4)]
    context.resume_at(0)

    first = add_slowly(0.0)  # takes the first number, and ends last
    drawn = [draw(first), draw(2.0), draw(3.0)]

    assert [read(value) for value in drawn] == expected[1:]
    assert context.num_invocations == 4


def test_closed_context(local_contexts: Any) -> None:
    context = RayFederatedContext(local_contexts(workers=1))
    done = context.invoke(add, (1.0, 2.0))
    read(done)
    pending = context.invoke(add_slowly, 1.0)
    for _ in range(20):
        pending = context.invoke(add_slowly, pending)

    context.close()
    context.close()

    for reference in (done, pending):
        with pytest.raises(errors.ContextStateError, match="closed"):
            read(reference)
    with pytest.raises(errors.ContextStateError, match="closed"):
        context.invoke(add, (1.0, 2.0))
    assert context.execution_context.invoke(add, (1.0, 2.0)) == 3.0


def test_context_of_its_own_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_FED_BACKEND", "local")
    with RayFederatedContext() as context:
        assert read(context.invoke(add, (1.0, 2.0))) == 3.0
        inner = context.execution_context
        pending = context.invoke(add_slowly, 1.0)

    assert not inner.is_open
    with pytest.raises(errors.ContextStateError):
        read(pending)


def test_inner_context_that_is_closed_first(local_contexts: Any) -> None:
    inner = local_contexts(workers=1)
    with RayFederatedContext(inner) as context:
        pending = context.invoke(add_slowly, 1.0)
        inner.close()

        with pytest.raises(errors.ContextStateError):
            read(pending)
        with pytest.raises(errors.ContextStateError):
            context.invoke(add, (1.0, 2.0))


def test_report_is_that_of_the_context_below(context: RayFederatedContext) -> None:
    read(add_sum(0.0, [1.0, 2.0]))

    report = context.execution_context.last_report

    assert isinstance(report, ray_fed.RoundReport)
    assert report.num_clients == 2


@rtf.computation(np.float32)
def refuse_negative(total: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_non_negative(total)]):
        return {"total": tf.identity(total), "twice": total * 2.0}


@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def refuse_negative_sum(values: Any) -> Any:
    return fl.federated_map(refuse_negative, fl.federated_sum(values))


@pytest.mark.ray
def test_ray_prints_no_error_of_a_result_that_stays_there(
    ray_contexts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[Exception] = []
    monkeypatch.setattr(ray_worker, "_unhandled_error_handler", printed.append)

    with RayFederatedContext(ray_contexts(workers=2, subrounds=2)) as context:
        kept = context.invoke(refuse_negative_sum, [np.float32(-1.0)] * 2)
        with pytest.raises(errors.ComputationError):
            asyncio.run(fl.program.materialize_value(kept))
    del kept
    gc.collect()

    assert printed == []
