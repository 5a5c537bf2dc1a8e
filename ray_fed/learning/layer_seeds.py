"""What random layers draw from: seeds of one client in one call.

Keras keeps a seed and a count in each random layer (`SeedGenerator`), and counts each
draw, so steps and epochs differ once clients do:

    at the server           [seed, 0]                  as the layer was made
    at a client             [seed, 0] + key            before its first batch
    after n draws           [seed, 0] + key + [0, n]   by Keras

The key is a random number like all others of ray_fed: of the run's seed, the call (and
so the round), the client, and the place in the computation. Layers of one seed draw the
same, as they do in Keras.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state  # no public name
from keras.src.random import seed_generator  # no public name


def reseed(seed_indices: Sequence[int], non_trainable: Sequence[Any]) -> Any:
    """Return weights that are not trained, with seeds for a client's next pass.

    Call it in a client's graph: each call draws another key.

    Args:
        seed_indices: of a `Model`.
        non_trainable: as in `ModelWeights`; from the server.
    """
    seeded = list(non_trainable)
    if seed_indices:
        key = _draw()
        for index in seed_indices:
            seeded[index] += tf.cast(key, seeded[index].dtype)
    return tuple(seeded)


def _draw() -> tf.Tensor:
    return tf.raw_ops.NonDeterministicInts(shape=[2], dtype=tf.int64)


class _GraphSeeds:
    """Stands for a `SeedGenerator`, without a variable."""

    def next(self, ordered: bool = True) -> tf.Tensor:  # noqa: ARG002, FBT001, FBT002
        return _draw()


@contextlib.contextmanager
def keyed_global_seeds() -> Generator[None]:
    """Let layers that draw without a seed draw keyed numbers in the current graph.

    Keras' own global generator is a variable, which belongs to no model and so to no
    graph of ray_fed.
    """
    name = seed_generator.GLOBAL_SEED_GENERATOR
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, _GraphSeeds())
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)
