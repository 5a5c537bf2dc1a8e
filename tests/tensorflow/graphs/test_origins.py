"""Errors name the computation that raised them, wherever it has been since."""

# pyright: reportUnknownLambdaType=false

import asyncio
import functools
import pickle
import re
from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
import keras
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.compiler.split import compile_to_mergeable_comp_form
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.executors.eager_tf import EagerTFExecutor

ContextFactory = Callable[..., ExecutionContext]

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)


def check(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(x > 0, ["not positive"])]):
        return tf.identity(x)


CHECK_LINE = check.__code__.co_firstlineno


class Checker:
    def __call__(self, x: Any) -> Any:
        return check(x)

    def method(self, x: Any) -> Any:
        return check(x)


def scaled(factor: float, x: Any) -> Any:
    return factor * check(x)


def of(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return fn


def origin(comp: Any) -> str:
    return graph_message.origin_of(comp.to_proto().tensorflow)


def compiled(source: str, filename: str, first_line: int = 1) -> Any:
    names: dict[str, Any] = {"tf": tf, "check": check}
    code = compile("\n" * (first_line - 1) + source, filename, "exec")
    exec(code, names)
    return names["work"]


def failure_of(work: Any, value: float) -> errors.ComputationError:
    """Return the error of a client's work, as it comes from another process."""

    async def call() -> None:
        executor = EagerTFExecutor()
        function = await executor.create_value(work)
        arg = await executor.create_value(value, np.float32)
        await stacks.map_embedded(executor, function, [arg], range(1))

    with pytest.raises(errors.ComputationError) as caught:
        asyncio.run(call())
    return pickle.loads(pickle.dumps(caught.value))


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        pytest.param(
            check, rf"`check` \(test_origins.py:{CHECK_LINE}\)", id="function"
        ),
        pytest.param(
            tf.function(check),
            rf"`check` \(test_origins.py:{CHECK_LINE}\)",
            id="tf.function",
        ),
        pytest.param(
            of(lambda x: 2 * check(x)),
            r"`<lambda>` \(test_origins.py:\d+\)",
            id="lambda",
        ),
        pytest.param(
            functools.partial(scaled, 2.0),
            r"`scaled` \(test_origins.py:\d+\)",
            id="partial",
        ),
        pytest.param(
            Checker().method, r"`method` \(test_origins.py:\d+\)", id="method"
        ),
        pytest.param(Checker(), r"`Checker` \(test_origins.py:\d+\)", id="object"),
        pytest.param(
            compiled("def work(x): return check(x)", "/home/me/secret/model.py", 7),
            r"`work` \(model.py:7\)",
            id="elsewhere",
        ),
        pytest.param(
            compiled("def work(x): return check(x)", "/tmp/ipykernel_12/99.py", 3),
            r"`work` \(<cell>:3\)",
            id="notebook",
        ),
        pytest.param(
            compiled("def work(x): return check(x)", "<stdin>"),
            r"`work` \(<stdin>:1\)",
            id="prompt",
        ),
    ],
)
def test_an_origin_is_a_name_and_a_line(fn: Any, expected: str) -> None:
    comp = rtf.computation(fn, np.float32)

    assert re.fullmatch(f"the computation {expected}", origin(comp))
    assert b"/home" not in comp.to_proto().SerializeToString()


def test_a_message_without_origin_is_a_tensorflow_computation() -> None:
    comp = rtf.computation(check, np.float32)
    proto = comp.to_proto()
    proto.tensorflow.graph_def.Pack(graph_message.graph_of(proto.tensorflow))

    assert str(failure_of(proto, -1.0)) == (
        "A TensorFlow computation raised InvalidArgumentError: assertion failed:"
        " [not positive] [client at position 0]"
    )


def test_the_same_function_is_the_same_message_again() -> None:
    first, second = (rtf.computation(check, np.float32).to_proto() for _ in range(2))

    assert first == second


def test_draws_do_not_depend_on_the_line(local_contexts: ContextFactory) -> None:
    source = "def work(x): return x + tf.random.uniform([])"
    first, second = (
        rtf.computation(compiled(source, "model.py", line), np.float32)
        for line in (1, 9)
    )

    drawn = [local_contexts(workers=1).invoke(work, 0.0) for work in (first, second)]

    assert origin(first) != origin(second)
    assert drawn[0] == drawn[1]


@fl.federated_computation(AT_CLIENTS)
def checked_mean(x: Any) -> Any:
    inner = rtf.computation(check, np.float32)
    return fl.federated_mean(
        fl.federated_map(
            fl.federated_computation(of(lambda y: inner(inner(y))), np.float32), x
        )
    )


MESSAGE = (
    f"The computation `check` (test_origins.py:{CHECK_LINE}) raised"
    " InvalidArgumentError: assertion failed: [not positive]"
)


def test_a_computation_inside_a_lambda_is_named_after_compiling(
    local_contexts: ContextFactory,
) -> None:
    form = compile_to_mergeable_comp_form(cast("Any", checked_mean))

    with pytest.raises(errors.ComputationError) as caught:
        local_contexts(workers=2).invoke(form, [1.0, 2.0, 3.0, -1.0, 5.0])

    assert caught.value.message == MESSAGE
    assert caught.value.location.client_index == 3


@pytest.mark.ray
def test_a_computation_is_named_on_ray(ray_contexts: ContextFactory) -> None:
    context = ray_contexts(workers=2)

    with pytest.raises(errors.ComputationError) as caught:
        context.invoke(checked_mean, [1.0, 2.0, 3.0, -1.0, 5.0])

    assert caught.value.message == MESSAGE
    assert caught.value.location.client_index == 3
    assert caught.value.location.node is not None


def test_another_computation_called_inside_counts_as_the_caller() -> None:
    inner = rtf.computation(check, np.float32)
    outer = rtf.computation(of(lambda x: 2 * inner(x)), np.float32)

    assert origin(outer).startswith("the computation `<lambda>` (test_origins.py:")


class Root(keras.layers.Layer):
    @override
    def call(self, inputs: Any) -> Any:
        tf.debugging.assert_non_negative(inputs)
        return tf.sqrt(inputs)


class Shifted(keras.layers.Layer):
    @override
    def call(self, inputs: Any) -> Any:
        return Root()(inputs) + keras.layers.Embedding(2, 1)(inputs)


SHIFTED = rtf.computation(lambda x: Shifted()(tf.reshape(x, [1])), np.float32)


def line_of(function: Any, index: int) -> int:
    return function.__code__.co_firstlineno + index


def test_an_error_names_the_line_of_a_layer() -> None:
    error = failure_of(SHIFTED, -1.0)

    (note,) = error.__notes__
    line = line_of(Root.call, 2)
    assert re.fullmatch(rf"At test_origins.py:{line}, in `call` \(`[^`]+`\)\.", note)


def test_an_error_of_a_layer_of_keras_names_where_it_is_called() -> None:
    error = failure_of(SHIFTED, 7.0)

    (note,) = error.__notes__
    line = line_of(Shifted.call, 2)
    assert note.startswith(f"At test_origins.py:{line}, in `call` (`")
    assert "embedding" in note


def test_an_error_of_a_python_function_names_its_line() -> None:
    def refuse(x: Any) -> Any:
        raise ValueError("no")

    work = rtf.computation(
        lambda x: tf.py_function(refuse, [x], tf.float32), np.float32
    )
    error = failure_of(work, 1.0)

    assert error.__notes__ == [f"At test_origins.py:{line_of(refuse, 1)}, in `refuse`."]


def test_lines_of_nodes_change_no_graph() -> None:
    message = rtf.computation(check, np.float32).to_proto().tensorflow
    graph_def = graph_message.graph_of(message)

    assert not graph_def.HasField("debug_info")
    assert graph_message.place_of(graph_def, "{{node Assert}}") == ""
