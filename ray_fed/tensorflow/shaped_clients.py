"""A leaf's clients where all are of one shape: several at once, or compiled by XLA.

Both want sizes that are known when traced, so there is a graph for each shape; and both
may give other bits than one client at a time. So a leaf runs here or not by what is in
it, as a whole, and the bits depend on settings and data alone.

    clients of a leaf      0 1 2 3 4 5 6          k = 3
    windows of rows        [0 1 2 3 4 5 6 . .]    of a fixed number of clients
    at once                (0 1 2) (3 4 5) 6      work; accumulated in order
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from ray_fed.tensorflow.client_data import ClientLayout, ClientShape, flatten
from ray_fed.tensorflow.grafts import Grafts

_WINDOW = 32
"""Clients whose rows one step takes, about; XLA compiles for a fixed number."""


class Work(Protocol):
    """What is done with a client; a graph is built by it."""

    def work(self, grafts: Grafts, constants: Sequence[Any], member: Any) -> list[Any]:
        """Return what a client's value comes to, as tensors."""
        ...

    def fold(
        self,
        grafts: Grafts,
        accumulators: Sequence[Any],
        worked: Sequence[Any],
        constants: Sequence[Any],
    ) -> list[Any]:
        """Return the accumulators after a client."""
        ...


class ShapedClients:
    """Folds clients of one shape, inside of a graph.

    Args:
        client: what is done with each.
        layout: of the data.
        shape: of each client's.
        at_once: how many clients' work runs vectorised.
        jit: whether XLA compiles it.
    """

    def __init__(
        self,
        client: Work,
        layout: ClientLayout,
        shape: ClientShape,
        *,
        at_once: int,
        jit: bool,
    ) -> None:
        self._client = client
        self._layout = layout
        self._shape = shape
        self._extents = layout.extents(shape)
        self._at_once = at_once
        self._window = max(1, _WINDOW // at_once) * at_once
        self._run: Callable[..., Any] = self._fold_window
        if jit:
            self._run = tf.function(
                self._fold_window, jit_compile=True, autograph=False
            )

    def fold(
        self,
        clients: tuple[tf.Tensor, tf.Tensor],
        accumulators: Sequence[tf.Tensor],
        constants: Sequence[tf.Tensor],
        data: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Return the accumulators after some clients.

        Args:
            clients: the first of them, and one past the last, i64[].
            accumulators: before the first.
            constants: the same for all.
            data: of all clients.
        """
        first, stop = clients

        def step(index: tf.Tensor, *held: tf.Tensor) -> list[tf.Tensor]:
            count = tf.minimum(stop - index, self._window)
            rows = self._rows(data, index)
            return [index + self._window, *self._run(count, held, constants, rows)]

        def goes_on(index: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            return index < stop

        shapes = [tensor.shape for tensor in accumulators]
        _, *folded = tf.while_loop(
            goes_on,
            step,
            [first, *accumulators],
            shape_invariants=[first.shape, *shapes],
            parallel_iterations=1,
        )
        return folded

    def _rows(
        self, data: Sequence[tf.Tensor], index: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Return the rows of a window of clients; past the last one's, anything."""
        starts = [
            index if extent.place is None else data[-1][index, extent.place, 0]
            for extent in self._extents
        ]
        laid = [data[extent.tensor] for extent in self._extents]
        sizes = [self._window * extent.num_rows for extent in self._extents]
        left = [
            tf.shape(tensor, tf.int64)[0] - start
            for tensor, start in zip(laid, starts, strict=True)
        ]

        def sliced() -> list[tf.Tensor]:  # without a copy, where rows are aligned
            return [
                tf.slice(tensor, _start(tensor, start), [size, *tensor.shape[1:]])
                for tensor, start, size in zip(laid, starts, sizes, strict=True)
            ]

        def padded() -> list[tf.Tensor]:
            tensors: list[tf.Tensor] = []
            for tensor, start, size in zip(laid, starts, sizes, strict=True):
                rows = tensor[start : start + size]
                missing = size - tf.shape(rows, tf.int64)[0]
                pads = [[0, missing], *[[0, 0]] * (len(rows.shape) - 1)]
                tensors.append(tf.pad(rows, tf.convert_to_tensor(pads, tf.int64)))
            return tensors

        fits = tf.reduce_all(
            [size <= rest for size, rest in zip(sizes, left, strict=True)]
        )
        taken: Any = tf.cond(fits, sliced, padded)
        return tuple(
            tf.reshape(tensor, [self._window, *extent.shape])
            for tensor, extent in zip(
                tf.nest.flatten(taken), self._extents, strict=True
            )
        )

    def _fold_window(
        self,
        count: tf.Tensor,
        accumulators: Sequence[tf.Tensor],
        constants: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Return the accumulators after the first `count` clients of a window."""
        # Loops of a computation are more than TensorFlow vectorises.
        # XLA, and work on several clients at once, has bits of its own anyway.
        work = Grafts(stateless=True, unrolled=self._at_once > 1, isolated=False)
        fold = Grafts(stateless=True, isolated=False)

        @tf.autograph.experimental.do_not_convert
        def run(taken: Sequence[tf.Tensor]) -> list[Any]:
            member = self._layout.alike(list(taken), self._shape)
            return flatten_all(self._client.work(work, constants, member))

        def run_one(index: tf.Tensor, *held: tf.Tensor) -> list[Any]:
            worked = run([tf.gather(tensor, index) for tensor in rows])
            return [index + 1, *self._client.fold(fold, held, worked, constants)]

        def run_some(index: tf.Tensor, *held: tf.Tensor) -> list[Any]:
            taken = [
                tf.slice(t, _start(t, index), [self._at_once, *t.shape[1:]])
                for t in rows
            ]
            some: Any = tf.vectorized_map(run, taken, fallback_to_while_loop=False)
            folded = list(held)
            for position in range(self._at_once):
                worked = [tensor[position] for tensor in some]
                folded = self._client.fold(fold, folded, worked, constants)
            return [index + self._at_once, *folded]

        state = [tf.zeros([], tf.int64), *accumulators]
        if self._at_once > 1:
            whole = count // self._at_once * self._at_once
            state = _count_to(whole, run_some, state)
        return _count_to(count, run_one, state)[1:]


def flatten_all(members: Sequence[Any]) -> list[Any]:
    """Return the tensors of some values, in order."""
    return [tensor for member in members for tensor in flatten(member)]


def _start(tensor: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Return where a slice from an index on starts."""
    return tf.stack([index, *[tf.zeros([], tf.int64)] * (len(tensor.shape) - 1)])


def _count_to(
    stop: tf.Tensor, step: Callable[..., list[Any]], state: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    def goes_on(index: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
        return index < stop

    return tf.while_loop(
        goes_on,
        step,
        list(state),
        shape_invariants=[tensor.shape for tensor in state],
        parallel_iterations=1,
    )
