"""The work of a round as one hand-written graph over all clients: the limit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.workloads import Array, Tensors, Workload


def build_loop(workload: Workload, *, jit_compile: bool) -> Callable[..., Any]:
    """Return a graph of weights, data and a number of clients.

    It returns the clients' weights, summed and weighted by examples, and the sum of
    the weights.
    """
    examples = float(workload.num_examples)

    def train(weights: Tensors, x: Any, y: Any) -> Any:
        def step(index: Any, weights: Tensors) -> Any:
            return index + 1, workload.step(weights, x[index], y[index])

        def goes_on(index: Any, _: Tensors) -> Any:
            return index < workload.num_steps

        return tf.while_loop(goes_on, step, (0, tuple(weights)))[1]

    def run(weights: Tensors, x: Any, y: Any, num_clients: Any) -> Any:
        def add_client(index: Any, sums: Tensors, total: Any) -> Any:
            place = tf.math.floormod(index, tf.shape(x)[0])
            trained = train(weights, x[place], y[place])
            pairs = zip(sums, trained, strict=True)
            sums = tuple(held + examples * new for held, new in pairs)
            return index + 1, sums, total + examples

        def goes_on(index: Any, *_: Any) -> Any:
            return index < num_clients

        zeros = tuple(tf.zeros_like(held) for held in weights)
        _, sums, total = tf.while_loop(
            goes_on, add_client, (0, zeros, 0.0), parallel_iterations=1
        )
        return sums, total

    return tf.function(run, jit_compile=jit_compile)


class PlainShare:
    """Runs the clients of one process, whose data lie in tensors of its own.

    Args:
        workload: what clients do.
        clients: the share, by index in the cohort.
        num_distinct: client i has the data of i mod this.
    """

    def __init__(self, workload: Workload, clients: range, num_distinct: int) -> None:
        held = clients[: min(len(clients), num_distinct)]
        data = [workload.client(index % num_distinct) for index in held]
        self._x, self._y = (
            tf.constant(np.stack(column)) for column in zip(*data, strict=True)
        )
        self._weights = [tf.constant(weights) for weights in workload.initial()]
        self._count = len(clients)
        self._loops = {
            jit: build_loop(workload, jit_compile=jit) for jit in (False, True)
        }

    def run(
        self, *, jit_compile: bool, num_clients: int | None = None
    ) -> tuple[list[Array], float]:
        """Return the weighted sum and the weight of the share, or its first ones."""
        count = self._count if num_clients is None else num_clients
        loop = self._loops[jit_compile]
        sums, total = loop(self._weights, self._x, self._y, tf.constant(count))
        return [held.numpy() for held in sums], float(total)
