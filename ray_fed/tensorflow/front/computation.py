"""`computation`: the decorator that makes a TensorFlow function a computation."""

from collections.abc import Callable
from typing import Any

import federated_language as fl

from ray_fed.tensorflow.front import tracing
from ray_fed.tensorflow.tensors import specs


def _wrap(
    fn: Callable[..., Any],
    parameter_type: fl.Type | None,
    unpack: bool | None = None,  # noqa: FBT001 (ComputationWrapper passes it so)
    name: str | None = None,
) -> fl.framework.ConcreteComputation:
    del name
    return tracing.trace(fn, parameter_type, unpack=unpack)


computation: Callable[..., Any] = fl.framework.ComputationWrapper(
    _wrap, to_type_fn=specs.to_type, infer_type_fn=specs.infer_type
)
"""Make a Python function or `tf.function` over tensors a computation.

Forms, the types being anything that `fl.to_type` or TensorFlow's own specs say:

    @computation(np.float32)             one parameter
    @computation(np.int32, np.int32)     several, by the function's own names
    @computation                         none; or, where the function has some, a
                                         template that is traced for each argument type
    computation(fn, type), computation(fn), lambdas, tf.functions

The function sees tensors, `tf.data.Dataset` for a sequence, and the containers of its
type for structures; control flow over tensors is converted by autograph. Variables and
tables that it creates are initialised on every call. It may call other computations of
TensorFlow, which become part of it.

Raises:
    TypeError: parameter or result are not made of tensors, sequences and structures.
    ValueError: the function returns None.
"""
