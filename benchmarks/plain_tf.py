"""The work of a round as one hand-written graph over all clients: the limit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.workloads import Array, Tensors, Workload


def build_loop(workload: Workload, *, jit_compile: bool) -> Callable[..., Any]:
    """Return a graph of weights, rows, where clients' rows begin, and how many clients.

    It returns the clients' weights, summed and weighted by examples, and the sum of
    the weights.
    """

    def train(weights: Tensors, x: Any, y: Any, begin: Any, end: Any) -> Any:
        def step(at: Any, weights: Tensors) -> Any:
            size: Any = workload.batch_size
            if workload.sigma:  # the last batch may be smaller: nothing for XLA
                size = tf.minimum(size, end - at)
            batch = tf.slice(x, [at, 0], [size, workload.num_pixels])
            return at + size, workload.step(weights, batch, tf.slice(y, [at], [size]))

        def goes_on(at: Any, _: Tensors) -> Any:
            return at < end

        return tf.while_loop(goes_on, step, (begin, tuple(weights)))[1]

    def run(weights: Tensors, x: Any, y: Any, begins: Any, num_clients: Any) -> Any:
        def add_client(index: Any, sums: Tensors, total: Any) -> Any:
            place = tf.math.floormod(index, tf.shape(begins)[0] - 1)
            begin, end = begins[place], begins[place + 1]
            trained = train(weights, x, y, begin, end)
            examples = tf.cast(end - begin, tf.float32)
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
        data = [workload.batches(index % num_distinct) for index in held]
        self._x, self._y = (
            tf.constant(np.concatenate([b[name] for batches in data for b in batches]))
            for name in "xy"
        )
        counts = [sum(len(b["y"]) for b in batches) for batches in data]
        self._begins = tf.constant(np.cumsum([0, *counts], dtype=np.int32))
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
        data = self._x, self._y, self._begins
        sums, total = loop(self._weights, *data, tf.constant(count))
        return [held.numpy() for held in sums], float(total)
