"""Has TensorFlow run loaded graphs in the order in which their sums were written.

Its arithmetic optimisation makes (a + b) + c of a + (b + c) where it knows the shapes
of all three. What it knows depends on the form of a graph: of the same work, more in a
graph of one client than in a loop over many. So the bits would depend on it, too.
"""

import contextlib
import functools
from collections.abc import Generator
from typing import Any

from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2  # no public names
from tensorflow.python.eager import context  # no public name

_OFF = rewriter_config_pb2.RewriterConfig.OFF


def current() -> Any:
    """Return TensorFlow's `FunctionCallOptions` for graphs called on this thread."""
    eager: Any = context.context()
    options = eager.function_call_options
    return _in_order(options.config_proto_serialized, options.executor_type)


@contextlib.contextmanager
def used() -> Generator[None]:
    """Have graphs called with these options inside, on this thread."""
    eager: Any = context.context()
    before = eager.function_call_options
    eager.function_call_options = current()
    try:
        yield
    finally:
        eager.function_call_options = before


@functools.lru_cache(maxsize=16)
def _in_order(serialised: bytes, executor_type: str | None) -> Any:
    config: Any = config_pb2.ConfigProto.FromString(serialised)
    config.graph_options.rewrite_options.arithmetic_optimization = _OFF
    return context.FunctionCallOptions(executor_type, config)
