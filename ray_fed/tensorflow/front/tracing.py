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
from ray_fed.language import blocks, structs, type_checks
from ray_fed.tensorflow.front import captures, equality
from ray_fed.tensorflow.graphs import callbacks, graph_message, loader
from ray_fed.tensorflow.tensors import datasets, specs
from ray_fed.values import plain_values

_OWN_MODULES = f"{__name__.partition('.')[0]}."


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
        graph_def = graph_message.graph_of(message)
        loader.isolate(graph_def, message.initialize_op or None)
        names = graph_message.bound_names(message.result)
        fetched = tf.graph_util.import_graph_def(
            graph_def, input_map=feeds, return_elements=names, name="call"
        )
        tensors = graph_message.from_bound(fetched, message.result)
        result = _unflatten(iter(tensors), comp.type_signature.result)
        return fl.framework.type_to_py_container(result, comp.type_signature.result)


def _feeds(arg: Any, parameter: fl.Type | None, message: Any) -> dict[str, Any]:
    feeds: dict[str, Any] = {}
    if message.session_token_tensor_name:
        feeds[message.session_token_tensor_name] = tf.constant("")
    if parameter is not None:
        tensors = graph_message.to_bound(_flatten(arg, parameter), message.parameter)
        tensors = map(tf.identity, tensors)  # in the graph of a branch or loop body
        feeds |= zip(graph_message.bound_names(message.parameter), tensors, strict=True)
    return feeds


def _flatten(value: Any, type_spec: fl.Type) -> list[Any]:
    match type_spec:
        case fl.StructType():
            return [
                tensor
                for element_type, _, element in structs.struct_elements(
                    value, type_spec
                )
                for tensor in _flatten(element, element_type)
            ]
        case fl.SequenceType() if isinstance(value, tf.data.Dataset):
            found = specs.infer_type(value)
            type_checks.check_assignable(type_spec, found, "a dataset")
            dataset = datasets.to_canonical(value, type_spec.element)
            return [tf.data.experimental.to_variant(dataset)]
        case fl.TensorType():
            return [_to_tensor(value, type_spec)]
        case _:
            raise errors.ValueMismatchError(
                f"Expected a value of type `{type_spec}`, found {structs.show(value)}."
            )


def _to_tensor(value: Any, type_spec: fl.TensorType) -> tf.Tensor:
    spec = specs.to_spec(type_spec)
    if any(tf.is_tensor(leaf) for leaf in tf.nest.flatten(value)):
        tensor = tf.convert_to_tensor(value)
    else:
        tensor = tf.constant(plain_values.to_plain(value, type_spec), spec.dtype)
    if tensor.dtype != spec.dtype or not spec.shape.is_compatible_with(tensor.shape):
        found = specs.infer_type(tensor)
        raise errors.ValueMismatchError(
            f"Expected a tensor of type `{type_spec}`, found `{found}`: nothing is"
            " cast, so convert it first."
        )
    return tensor


def _unflatten(tensors: Any, type_spec: fl.Type) -> Any:
    match type_spec:
        case fl.StructType():
            return structs.Struct(
                (name, _unflatten(tensors, element))
                for name, element in type_spec.items()
            )
        case fl.SequenceType():
            return datasets.from_variant(next(tensors), type_spec.element)
        case _:
            tensor = next(tensors)
            tensor.set_shape(specs.to_spec(cast("fl.TensorType", type_spec)).shape)
            return tensor


@blocks.depth_in_words()
def trace(
    fn: Callable[..., Any], parameter: fl.Type | None, *, unpack: bool | None
) -> fl.framework.ConcreteComputation:
    """Return the computation that a Python function or `tf.function` is.

    Args:
        fn: takes tensors, datasets and structures of them; autograph converts it,
            unless it is of ray_fed.
        parameter: its type, None for a function of no arguments.
        unpack: whether a struct is handed over as several arguments; None: inferred.

    Raises:
        TypeError: a parameter or result is not made of tensors and sequences.
        ValueError: `fn` returns None.
        CompileError: a type nests deeper than protobuf reads.
    """
    outer = tf.compat.v1.get_default_graph()
    traced = equality.TracedGraph()
    stack = fl.framework.get_context_stack()
    ordered = AutomaticControlDependencies()
    with (
        traced.as_default(),
        stack.install(TracingContext()),
        equality.compared_by_element(),
        captures.captured_as_constants(),
        ordered,
    ):
        if parameter is None:
            binding, args, kwargs = None, [], {}
        else:
            value, binding = graph_message.stamp_parameter(parameter)
            args, kwargs = fl.framework.unpack_arg(
                cast("Any", fn), parameter, value, unpack
            )
        result = _convert(fn)(*args, **kwargs)
        if result is None:
            raise fl.framework.ComputationReturnedNoneError(_python_function(fn))
        result = _read_variables(result)
        result_type = specs.infer_type(result)
        result_binding = graph_message.bind_result(
            result, result_type, ordered.mark_as_return
        )
    with traced.as_default():
        initialize_op = _initialize_op()
    callbacks.keep(traced, outer)
    message = graph_message.build_message(
        traced, binding, result_binding, initialize_op, fn
    )
    type_spec = fl.FunctionType(parameter, result_type)
    return fl.framework.ConcreteComputation(
        computation_proto=graph_message.build_computation(message, type_spec),
        context_stack=stack,
        annotated_type=type_spec,
    )


def _convert(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let autograph see Python's own `for`, `while` and `if` over tensors.

    ray_fed's own functions have none. To convert them took two fifths of the time of
    `build_fed_avg` (2026-11-27).
    """
    if hasattr(fn, "get_concrete_function"):
        return fn
    if str(getattr(fn, "__module__", "")).startswith(_OWN_MODULES):
        return tf.autograph.experimental.do_not_convert(fn)
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
