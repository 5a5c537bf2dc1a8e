"""Keys the random numbers of Keras inside computations, like TensorFlow's own ops.

Keras draws by stateless ops. Their seed is a whole number, or comes from a
`SeedGenerator`, which is a variable with a seed and a count. In the graph of a
computation, both would be equal in each call and at each client. So while a computation
is traced, a random number is added to the seeds: the *key*. A random op of the graph
draws the key. The run's seed, the call, the client and the op's place in the
computation decide its value (`ray_fed.plan.random_keys`).

    SeedGenerator(3)           [3, 0] + key, [3, 1] + key, ...    as Keras counts
    SeedGenerator()            [n, 0] + key, [n, 1] + key, ...    n: one for each
    an initializer, no seed    [n, 0] + key                       the same in each use
    keras.random, no seed      a random op of the graph           for each draw
    seed=3, a whole number     [3, 0]                             as it was written

So layers with the same seed draw the same numbers in one evaluation, as they do in
Keras. Generators from outside of the computation count from 0 in each evaluation.
Keras' functions with a whole number as seed return the same in each call, as Keras
documents.

If a `keras.StatelessScope` has a true attribute `seeds_are_keyed`, its seeds have a key
already (`ray_fed.learning.models`).
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from ray_fed.tensorflow.traced_graph import (
    Method,
    Replacements,
    TracedGraph,
    current_graph,
    traced_graph,
)

_FIRST_DEFAULT = 10**9 + 1
"""Keras' own default seeds are smaller."""


def draw_key() -> tf.Tensor:
    """Return a random number to add to seeds, i64[2], different in each call."""
    return tf.raw_ops.NonDeterministicInts(shape=[2], dtype=tf.int64)


def is_loaded() -> bool:
    """Return whether Keras was imported, with TensorFlow as its backend."""
    return "keras.src.backend.tensorflow.random" in sys.modules


@contextlib.contextmanager
def keyed() -> Generator[None]:
    """Let Keras draw keyed numbers in computations that the `with` block traces."""
    if not is_loaded():
        yield
        return
    with _replaced(), keyed_global_draws():
        yield


@contextlib.contextmanager
def keyed_global_draws() -> Generator[None]:
    """In the `with` block, let each Keras draw without a seed use a new key as seed.

    This replaces Keras' global generator, a variable that belongs to one graph.
    """
    from keras.src.backend.common import global_state  # no public name
    from keras.src.random import seed_generator  # no public name

    name = seed_generator.GLOBAL_SEED_GENERATOR
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, _GlobalGenerator())
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


def forget_global_draws() -> None:
    """Let Keras create its generator for draws without a seed again, on first use."""
    from keras.src.backend.common import global_state  # no public name
    from keras.src.random import seed_generator  # no public name

    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)


class _GlobalGenerator:
    """A `SeedGenerator` without a variable, whose seeds are keys."""

    def next(self, ordered: bool = True) -> tf.Tensor:  # noqa: ARG002, FBT001, FBT002
        return draw_key()


class _DefaultSeed(int):
    """A seed that ray_fed chose. Two draws with it return the same numbers."""


def _replaced() -> AbstractContextManager[None]:
    return _replacements().replaced()


@functools.cache
def _replacements() -> Replacements:
    from keras.src.random import seed_generator  # no public name

    replacements: dict[tuple[Any, str], Callable[[Any], Any]] = {
        (seed_generator, "python_random"): _counting,
        (seed_generator.SeedGenerator, "next"): _adding_key,
    }
    for name in ("random", "image"):  # of Keras' modules, those that draw
        module: Any = sys.modules.get(f"keras.src.backend.tensorflow.{name}")
        if hasattr(module, "draw_seed"):
            replacements[module, "draw_seed"] = _keying_defaults
    return Replacements(replacements)


def _counting(original: Any) -> Any:

    def randint(first: int, last: int) -> int:
        graph = current_graph()
        return original.randint(first, last) if graph is None else _default_of(graph)

    return types.SimpleNamespace(randint=randint)


def _keying_defaults(original: Method) -> Method:
    @tf.autograph.experimental.do_not_convert
    def draw_seed(seed: Any) -> Any:
        graph = current_graph()
        if graph is None or not isinstance(seed, _DefaultSeed):
            return original(seed)
        return _start(seed) + _key_of(graph)

    return draw_seed


def _adding_key(original: Method) -> Method:
    @tf.autograph.experimental.do_not_convert
    def next_seed(generator: Any, ordered: bool = True) -> Any:  # noqa: FBT001, FBT002
        from keras.src.backend.common import stateless_scope  # no public name

        graph = current_graph()
        scope: Any = stateless_scope.get_stateless_scope()
        if graph is None or getattr(scope, "seeds_are_keyed", False):
            return original(generator, ordered)
        state = generator.state
        is_mapped = scope is not None and scope.get_current_value(state) is not None
        if is_mapped or _is_of(graph, state):
            return original(generator, ordered) + _key_of(graph)
        counted = graph.write_once(generator, _count_of)
        seed = counted.read_value()
        counted.assign_add(np.array([0, 1]))
        return seed + _key_of(graph)

    return next_seed


def _is_of(graph: TracedGraph, state: Any) -> bool:
    variable = state._value  # noqa: SLF001 (no public way)
    if variable is None:  # from a stateless scope: Keras computes it where it is read
        return True
    handle = variable.handle
    return tf.is_symbolic_tensor(handle) and traced_graph(handle.graph) is graph


def _count_of(generator: Any) -> tf.Variable:
    graph = current_graph()
    assert graph is not None
    seed = generator._initial_seed  # noqa: SLF001 (no public way)
    return tf.Variable(_start(_default_of(graph) if seed is None else seed))


def _start(seed: int) -> tf.Tensor:
    return tf.constant([int(seed), 0], tf.int64)


def _key_of(graph: TracedGraph) -> tf.Tensor:
    return graph.write_once(draw_key, lambda draw: draw())


def _default_of(graph: TracedGraph) -> _DefaultSeed:
    # The number depends on the graph alone, so a second trace has the same draws.
    graph.num_default_seeds += 1
    return _DefaultSeed(_FIRST_DEFAULT + graph.num_default_seeds)
