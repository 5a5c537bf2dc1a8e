"""What is computed at the server as one graph: as executors do it, bit for bit."""

import asyncio
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.language import blocks
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.kernels.graph_functions import as_pruned_graph
from ray_fed.tensorflow.kernels.server_kernels import ServerGraph
from ray_fed.values import stored

FLOATS = fl.TensorType(np.float32, [1000])
AT_SERVER = fl.FederatedType(FLOATS, fl.SERVER)
AT_CLIENTS = fl.FederatedType(FLOATS, fl.CLIENTS)
NUMBERS = np.random.default_rng(0).normal(size=[4, 1000]).astype(np.float32)


@rtf.computation(FLOATS, np.float32)
def divide(x: Any, y: Any) -> Any:
    return x / y


@rtf.computation
def third() -> Any:
    return tf.constant(3.0)


@rtf.computation(FLOATS, FLOATS)
def add(x: Any, y: Any) -> Any:
    return x + y


@rtf.computation(FLOATS)
def noisy(x: Any) -> Any:
    return x + tf.random.normal([])


@rtf.computation(FLOATS)
def printed(x: Any) -> Any:
    with tf.control_dependencies([tf.print(x)]):
        return tf.identity(x)


@rtf.computation(FLOATS)
def checked(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_positive(x)]):
        return tf.identity(x)


@rtf.computation(FLOATS, FLOATS)
def adam_step(weights: Any, gradient: Any) -> Any:
    variable = tf.Variable(weights)
    optimizer: Any = keras.optimizers.Adam(0.1)
    optimizer.build([variable])
    optimizer.apply_gradients([(gradient, variable)])
    return variable, optimizer.iterations.value


@fl.federated_computation(*[AT_SERVER] * 2)
def two_steps(weights: Any, gradient: Any) -> Any:
    once = fl.federated_map(adam_step, (weights, gradient))
    return fl.federated_map(adam_step, (once[0], gradient))


@fl.federated_computation(AT_SERVER)
def divided_by_a_literal(x: Any) -> Any:
    @fl.federated_computation(FLOATS)
    def work(x: Any) -> Any:
        return divide(x, 3.0)

    return fl.federated_map(work, x)


@fl.federated_computation(AT_SERVER)
def divided_by_a_result(x: Any) -> Any:
    return fl.federated_map(divide, (x, fl.federated_eval(third, fl.SERVER)))


@fl.federated_computation(*[AT_SERVER] * 4)
def summed_one_by_one(a: Any, b: Any, c: Any, d: Any) -> Any:
    total = a
    for term in (b, c, d):
        total = fl.federated_map(add, (total, term))
    return total


@fl.federated_computation(*[AT_SERVER] * 2)
def named(a: Any, b: Any) -> Any:
    return {"sum": fl.federated_map(add, (a, b)), "second": b}


@fl.federated_computation(AT_SERVER, AT_CLIENTS)
def leaves_clients_out(a: Any, clients: Any) -> Any:
    del clients
    return fl.federated_map(add, (a, a))


def graph_of(comp: Any) -> ServerGraph:
    return ServerGraph(blocks.serialize(comp.to_building_block()), None)


def compute(comp: Any, argument: Any) -> Any:
    """Return what executors make of it, plain."""
    leaf = stacks.device_stack()

    async def run() -> Any:
        over = stacks.local_stack(0, [leaf], leaf, 1)
        function = await over.create_value(comp.to_building_block())
        parameter = comp.type_signature.parameter
        called = await over.create_call(
            function, await over.create_value(argument, parameter)
        )
        return await stacks.fetch(called)

    try:
        return asyncio.run(run())
    finally:
        leaf.close()


@pytest.mark.parametrize(
    ("comp", "argument", "by_numpy"),
    [
        (divided_by_a_literal, NUMBERS[0], [NUMBERS[0] / np.float32(3)]),
        (divided_by_a_result, NUMBERS[0], [NUMBERS[0] / np.float32(3)]),
        (
            summed_one_by_one,
            tuple(NUMBERS),
            [((NUMBERS[0] + NUMBERS[1]) + NUMBERS[2]) + NUMBERS[3]],
        ),
        (named, tuple(NUMBERS[:2]), [NUMBERS[0] + NUMBERS[1], NUMBERS[1]]),
    ],
    ids=["literal", "result", "sums", "named"],
)
def test_has_the_bits_of_executors_and_of_numpy(
    comp: Any, argument: Any, by_numpy: list[Any]
) -> None:
    tensors = graph_of(comp).run([argument])

    expected = compute(comp, argument)
    found = [tensor.numpy().tobytes() for tensor in tensors]
    leaves = expected if isinstance(expected, tuple) else [expected]
    assert found == [leaf.tobytes() for leaf in leaves]
    assert found == [leaf.tobytes() for leaf in by_numpy]


def test_does_without_what_is_not_read() -> None:
    tensors = graph_of(leaves_clients_out).run([(NUMBERS[0], None)])

    np.testing.assert_array_equal(tensors[0], NUMBERS[0] + NUMBERS[0])


def test_passes_arguments_on_without_a_graph() -> None:
    def build(x: Any) -> list[Any]:
        return [tf.identity(tf.compat.v1.placeholder_with_default(x, x.shape))]

    run, read = as_pruned_graph(build, [tf.TensorSpec([1000], tf.float32)])
    tensor = tf.constant(NUMBERS[0])

    assert read == [0]
    assert run([tensor])[0] is tensor


def test_takes_parts_of_stored_values() -> None:
    given = stored.StoredComponents((NUMBERS[0],))

    tensors = graph_of(leaves_clients_out).run([(given, None)])

    np.testing.assert_array_equal(tensors[0], NUMBERS[0] + NUMBERS[0])


def test_mean_of_no_clients_is_left_to_executors() -> None:
    @fl.federated_computation(AT_CLIENTS)
    def mean(x: Any) -> Any:
        return fl.federated_mean(x)

    from ray_fed.compiler.split import compile_to_chain

    computation: Any = mean
    chain = compile_to_chain(computation)
    sums = np.zeros(1000, np.float32)

    graph = graph_of(chain.after_merge)

    (with_clients,) = graph.run([([], ((sums, np.int32(2)),))])
    assert with_clients is not None
    with pytest.raises(Fallback, match="a mean with a count of zero"):
        graph.run([([], ((sums, np.int32(0)),))])


@pytest.mark.parametrize("work", [noisy, printed], ids=["draws", "effects"])
def test_refuses(work: Any) -> None:
    @fl.federated_computation(AT_SERVER)
    def mapped(x: Any) -> Any:
        return fl.federated_map(work, x)

    with pytest.raises(Fallback, match="state or effects"):
        graph_of(mapped)


def test_variables_are_made_anew_in_each_call() -> None:
    graph = graph_of(two_steps)
    given = [(NUMBERS[0], NUMBERS[1])]

    found = [graph.to_plain(graph.run(given)) for _ in range(2)]

    expected = compute(two_steps, (NUMBERS[0], NUMBERS[1]))
    for weights, steps in found:
        assert steps == expected[1] == 1
        assert weights.tobytes() == expected[0].tobytes()
    variable = keras.Variable(NUMBERS[0])
    for _ in range(2):
        keras.optimizers.Adam(0.1).apply([NUMBERS[1]], [variable])
    np.testing.assert_allclose(found[0][0], np.asarray(variable), rtol=1e-6)


def test_assertion_that_fails_is_an_error() -> None:
    @fl.federated_computation(AT_SERVER)
    def mapped(x: Any) -> Any:
        return fl.federated_map(checked, x)

    graph = graph_of(mapped)

    (passed,) = graph.run([abs(NUMBERS[0]) + 1])
    assert passed.numpy().tobytes() == (abs(NUMBERS[0]) + 1).tobytes()
    with pytest.raises(tf.errors.InvalidArgumentError, match="x > 0"):
        graph.run([-abs(NUMBERS[0])])


def test_refuses_structures_that_take_long_to_build() -> None:
    many = fl.StructType([fl.FederatedType(np.float32, fl.SERVER)] * 501)

    @fl.federated_computation(many)
    def last(x: Any) -> Any:
        return x[500]

    with pytest.raises(Fallback, match="501 tensors"):
        graph_of(last)


def test_refuses_to_read_sequences() -> None:
    @rtf.computation(fl.SequenceType(np.int32))
    def count(data: Any) -> Any:
        return data.cardinality()

    @fl.federated_computation(fl.FederatedType(fl.SequenceType(np.int32), fl.SERVER))
    def counted(x: Any) -> Any:
        return fl.federated_map(count, x)

    with pytest.raises(Fallback, match=r"int32\*"):
        graph_of(counted)
