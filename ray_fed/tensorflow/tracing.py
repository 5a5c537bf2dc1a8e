"""Trace a Python function into a graph of its own, as federated_language's message.

Side effects run in the order they are written, as in a `tf.function`. Inside the
function a call of another computation is copied into the same graph.
Variables and tables that it makes are initialised anew on every call.
"""

from collections.abc import Callable
from typing import Any, cast

import federated_language as fl
import tensorflow as tf
from tensorflow.python.framework.auto_control_deps import (  # no public name
    AutomaticControlDependencies,
)
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tensorflow.graph as graph
import ray_fed.tensorflow.loader as loader
import ray_fed.tensorflow.specs as specs
import ray_fed.values as values


class TracingContext(fl.framework.SyncContext):
    """Imports a computation that a traced function calls into the current graph."""

    @override
    @tf.autograph.experimental.do_not_convert
    def invoke(self, comp: Any, arg: Any) -> Any:
        proto = comp.to_proto()
        if proto.WhichOneof("computation") != "tensorflow":
            raise errors.ContextStateError(
                "Expected only TensorFlow computations to be called inside of one,"
                f" found a computation of type `{comp.type_signature}`: call it from a"
                " federated_computation."
            )
        message = proto.tensorflow
        feeds = _feeds(arg, comp.type_signature.parameter, message)
        graph_def = graph.graph_of(message)
        loader.isolate(graph_def, message.initialize_op or None)
        names = graph.bound_names(message.result)
        fetched = tf.graph_util.import_graph_def(
            graph_def, input_map=feeds, return_elements=names, name="call"
        )
        result = _unflatten(iter(fetched), comp.type_signature.result)
        return fl.framework.type_to_py_container(result, comp.type_signature.result)


def _feeds(arg: Any, parameter: fl.Type | None, message: Any) -> dict[str, Any]:
    if parameter is None:
        return {}
    tensors = _flatten(arg, parameter)
    return dict(zip(graph.bound_names(message.parameter), tensors, strict=True))


def _flatten(value: Any, type_spec: fl.Type) -> list[Any]:
    match type_spec:
        case fl.StructType():
            return [
                tensor
                for element_type, _, element in values.struct_elements(value, type_spec)
                for tensor in _flatten(element, element_type)
            ]
        case fl.SequenceType():
            return [tf.data.experimental.to_variant(value)]
        case fl.TensorType():
            return [tf.convert_to_tensor(value, specs.to_tf_dtype(type_spec))]
        case _:
            raise TypeError(f"Expected tensors and sequences, found `{type_spec}`.")


def _unflatten(tensors: Any, type_spec: fl.Type) -> Any:
    match type_spec:
        case fl.StructType():
            return values.Struct(
                (name, _unflatten(tensors, element))
                for name, element in type_spec.items()
            )
        case fl.SequenceType():
            spec = specs.element_spec(type_spec.element)
            return tf.data.experimental.from_variant(next(tensors), spec)
        case _:
            return next(tensors)


def trace(
    fn: Callable[..., Any], parameter: fl.Type | None, *, unpack: bool | None
) -> fl.framework.ConcreteComputation:
    """Return the computation that a Python function or `tf.function` is.

    Args:
        fn: takes tensors, datasets and structures of them; autograph converts it.
        parameter: its type, None for a function of no arguments.
        unpack: whether a struct is handed over as several arguments; None: inferred.

    Raises:
        TypeError: a parameter or result is not made of tensors and sequences.
        ValueError: `fn` returns None.
    """
    traced = tf.Graph()
    stack = fl.framework.get_context_stack()
    ordered = AutomaticControlDependencies()
    with traced.as_default(), stack.install(TracingContext()), ordered:
        if parameter is None:
            binding, args, kwargs = None, [], {}
        else:
            value, binding = graph.stamp_parameter(parameter)
            args, kwargs = fl.framework.unpack_arg(
                cast("Any", fn), parameter, value, unpack
            )
        result = _convert(fn)(*args, **kwargs)
        if result is None:
            raise fl.framework.ComputationReturnedNoneError(_python_function(fn))
        result = _read_variables(result)
        result_type = specs.infer_type(result)
        result_binding = graph.bind_result(result, result_type, ordered.mark_as_return)
    with traced.as_default():
        initialize_op = _initialize_op()
    message = graph.build_message(traced, binding, result_binding, initialize_op)
    type_spec = fl.FunctionType(parameter, result_type)
    return fl.framework.ConcreteComputation(
        computation_proto=graph.build_computation(message, type_spec),
        context_stack=stack,
        annotated_type=type_spec,
    )


def _convert(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let autograph see Python's own `for`, `while` and `if` over tensors."""
    if hasattr(fn, "get_concrete_function"):
        return fn
    status = tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(fn, status)


def _python_function(fn: Any) -> Any:
    return getattr(fn, "python_function", fn)


def _read_variables(value: Any) -> Any:
    if isinstance(value, tf.Variable):
        return value.read_value()
    return value


def _initialize_op() -> str | None:
    variables = tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
    tables = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS)
    if not (variables or tables):
        return None
    initializers = [tf.compat.v1.variables_initializer(variables), *tables]
    return tf.group(*initializers, name="initialize").name
