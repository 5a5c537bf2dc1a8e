"""Claims of what the documents leave easy to miss that no other test holds."""

# pyright: reportUnknownLambdaType=false

import asyncio
import collections
import contextlib
import gc
import pathlib
from collections.abc import Callable, Generator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.compiler.form import MergeableCompForm
from ray_fed.compiler.split import compile_to_mergeable_comp_form
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.contexts.mergeable import MergeableCompExecutionContext
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.language import blocks
from ray_fed.tensorflow.graphs import callbacks
from ray_fed.worker.debugging_factory import thread_debugging_executor_factory

flf = fl.framework
ContextFactory = Callable[..., ExecutionContext]
federated_computation = cast("Callable[..., Any]", fl.federated_computation)

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.float32, fl.SERVER)
INTS = fl.SequenceType(np.int32)
NUM_ELEMENTS = 4_000_000
"""Of a variable of 16 MB."""


@rtf.computation(np.float32, np.float32)
def add(x: Any, y: Any) -> Any:
    return x + y


@rtf.computation
def one() -> Any:
    return np.float32(1)


@rtf.computation(np.int32)
def increment_twice(x: Any) -> Any:
    variable: Any = tf.Variable(tf.constant(10))
    variable.assign_add(x)
    variable.assign_add(x)
    return variable.read_value()


@rtf.computation(np.float32)
def large_variable(x: Any) -> Any:
    variable: Any = tf.Variable(tf.zeros([NUM_ELEMENTS]))
    variable.assign_add(tf.fill([NUM_ELEMENTS], x))
    return tf.reduce_max(variable.read_value())


@rtf.computation(np.float32)
def large_table(x: Any) -> Any:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, -1.0)
    table.insert(tf.range(200_000, dtype=tf.int64), tf.fill([200_000], x))
    return table.lookup(tf.constant(7, tf.int64))


def resident_megabytes() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.claim("semantics.05")
@pytest.mark.parametrize("subrounds", [1, 3])
def test_variables_start_afresh_for_each_client(
    local_contexts: ContextFactory, subrounds: int
) -> None:
    context = local_contexts(workers=1, subrounds=subrounds, clients_per_leaf=2)
    comp = federated_computation(
        lambda x: fl.federated_map(increment_twice, x),
        fl.FederatedType(np.int32, fl.CLIENTS),
    )

    assert context.invoke(comp, [1, 2, 2, 3, 1]) == [12, 14, 14, 16, 12]


@pytest.mark.claim("semantics.07")
@pytest.mark.parametrize(
    ("comp", "num_calls"), [(large_variable, 25), (large_table, 60)], ids=["var", "map"]
)
def test_what_a_call_created_is_freed_after_it(comp: Any, num_calls: int) -> None:
    executor = EagerTFExecutor()

    async def call(number: int) -> float:
        function = await executor.create_value(comp)
        argument = await executor.create_value(float(number), np.float32)
        return float(await (await executor.create_call(function, argument)).compute())

    for number in range(3):
        asyncio.run(call(number))
    gc.collect()
    before = resident_megabytes()
    results = [asyncio.run(call(number)) for number in range(num_calls)]
    gc.collect()

    assert results == list(range(num_calls))
    assert resident_megabytes() - before < 150  # kept, they would be 300 or more


CPU, GPU = "/device:CPU:0", "/device:GPU:7"
LONGS = fl.SequenceType(np.int64)


@pytest.mark.claim("semantics.13")
@pytest.mark.parametrize(
    ("function", "types", "argument", "expected"),
    [
        pytest.param(lambda: tf.data.Dataset.range(3), (), None, CPU, id="dataset"),
        pytest.param(
            lambda: [tf.data.Dataset.range(3), tf.constant(1) + 1],
            (),
            None,
            CPU,
            id="dataset in a struct",
        ),
        pytest.param(
            lambda n: tf.data.Dataset.range(0, n),
            (np.int64,),
            3,
            CPU,
            id="tensor to dataset",
        ),
        pytest.param(
            lambda x: x.skip(1), (LONGS,), [1, 2], CPU, id="dataset to dataset"
        ),
        pytest.param(lambda: tf.constant(1), (), None, GPU, id="tensor"),
        pytest.param(lambda x: x + 1, (np.int32,), 3, GPU, id="tensor to tensor"),
    ],
)
def test_functions_that_return_datasets_stay_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    types: Any,
    argument: Any,
    expected: str,
) -> None:
    comp = rtf.computation(function, *types) if types else rtf.computation(function)
    executor: Any = EagerTFExecutor()
    executor._device = GPU  # no such device is asked to run anything: see `scope`
    entered, called_on = list[str](), list[str]()
    device_scope, call_function = tf.device, callbacks.call

    @contextlib.contextmanager
    def scope(name: str) -> Generator[None]:
        entered.append(name)
        with device_scope(CPU):
            yield
        entered.pop()

    def note(*args: Any) -> Any:
        called_on.append(entered[-1])
        return call_function(*args)

    monkeypatch.setattr(tf, "device", scope)
    monkeypatch.setattr(callbacks, "call", note)

    async def call() -> Any:
        embedded = await executor.create_value(comp)
        arg = await executor.create_value(argument, types[0]) if types else None
        called = await executor.create_call(embedded, arg)
        getattr(called.reference, "dataset", None)  # what returns it runs when asked

    asyncio.run(call())

    assert called_on == [expected]


@pytest.mark.claim("semantics.18")
def test_the_compiler_understands_literals() -> None:
    @federated_computation(AT_CLIENTS)
    def shifted(clients: Any) -> Any:
        shift = fl.federated_value(0.5, fl.CLIENTS)
        total = fl.federated_sum(fl.federated_map(add, (clients, shift)))
        return total, fl.federated_value(10, fl.SERVER)

    form = compile_to_mergeable_comp_form(shifted)
    factory = thread_debugging_executor_factory()
    context = MergeableCompExecutionContext([flf.AsyncExecutionContext(factory)] * 2)
    result = context.invoke(form, [1.0, 2.0, 3.0])
    context.close()
    for number in range(3):
        factory.clean_up_executor({fl.CLIENTS: number})
    factory.clean_up_executor({})

    assert isinstance(form, MergeableCompForm)
    assert result == (7.5, 10)


@pytest.mark.claim("semantics.63")
@pytest.mark.parametrize("number", [0, 3])
def test_without_clients_in_the_argument_their_number_is_the_default(
    local_contexts: ContextFactory, number: int
) -> None:
    context = local_contexts(workers=1, default_num_clients=number)
    comp = federated_computation(
        lambda x: (fl.federated_eval(one, fl.CLIENTS), x), AT_SERVER
    )

    clients, server = context.invoke(comp, 2.0)

    assert (clients, server) == ([1.0] * number, 2.0)


@pytest.mark.claim("semantics.67")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(list, id="list"),
        pytest.param(tuple, id="tuple"),
        pytest.param(
            lambda n: tf.data.Dataset.from_tensor_slices(np.array(n, np.int32)),
            id="dataset",
        ),
    ],
)
def test_sequences_of_clients_may_be_lists_or_datasets(
    local_contexts: ContextFactory, make: Callable[[Any], Any]
) -> None:
    total = rtf.computation(lambda ds: ds.reduce(0, lambda x, y: x + y), INTS)
    comp = federated_computation(
        lambda x: fl.federated_map(total, x), fl.FederatedType(INTS, fl.CLIENTS)
    )

    result = local_contexts(workers=1).invoke(comp, [make([1, 2]), make([3])])

    assert result == [3, 3]


@pytest.mark.claim("semantics.79")
def test_an_empty_struct_may_stand_in_an_argument_that_is_cut(
    local_contexts: ContextFactory,
) -> None:
    comp = federated_computation(
        lambda x: (fl.federated_sum(x["clients"]), x["rest"]),
        collections.OrderedDict(clients=AT_CLIENTS, rest=[]),
    )
    context = local_contexts(workers=2, subrounds=2)

    total, rest = context.invoke(comp, {"clients": [1.0, 2.0, 3.0], "rest": []})

    assert (total, len(rest)) == (6.0, 0)


@pytest.mark.claim("semantics.14")
def test_a_computation_nested_too_deep_is_refused_in_words(
    local_contexts: ContextFactory,
) -> None:
    literal = flf.Literal(np.int32(5), fl.TensorType(np.int32))
    block: flf.ComputationBuildingBlock = literal
    for index in range(100):
        block = flf.Block([(f"x{index}", block)], literal)

    with pytest.raises(errors.CompileError, match="name intermediate results"):
        blocks.serialize(flf.Lambda(None, None, block))
