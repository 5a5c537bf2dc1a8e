"""A leaf's clients where all are of one shape: several at once, or compiled by XLA.

Both want sizes that are known when traced, so there is a graph for each shape; and both
may give other bits than one client at a time. So a leaf runs here or not by what is in
it, as a whole, and the bits depend on settings and data alone.

    clients of a leaf      0 1 2 3 4 5 6          k = 3
    window of rows         [. 0 1 2 3 4 5 6]      of a fixed number of clients
    at once                (0 1 2) (3 4 5) 6      work; accumulated in order
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from ray_fed.tensorflow.kernels.client_tensors import ClientLayout, ClientShape
from ray_fed.tensorflow.kernels.grafts import Grafts
from ray_fed.tensorflow.kernels.graph_values import flatten

_MOST_IN_WINDOW = 64
"""Clients whose rows one step takes; XLA compiles for a fixed number."""


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


@dataclasses.dataclass(frozen=True)
class Window:
    """What one step takes.

    Attributes:
        size: in clients.
        is_whole: whether no leaf has more.
    """

    size: int
    is_whole: bool

    @classmethod
    def of(cls, leaf_size: int) -> "Window":
        """Return a window for leaves of a size, those of their cohort.

        A power of two, so that cohorts of about one size have one graph.
        """
        size = min(1 << (leaf_size - 1).bit_length(), _MOST_IN_WINDOW)
        return cls(size, leaf_size <= size)


class ShapedClients:
    """Folds clients of one shape, inside of a graph.

    Args:
        client: what is done with each.
        layout: of the data.
        shape: of each client's.
        window: of rows that one step takes.
        at_once: how many clients' work runs vectorised.
        jit: whether XLA compiles it.
    """

    def __init__(
        self,
        client: Work,
        layout: ClientLayout,
        shape: ClientShape,
        *,
        window: Window,
        at_once: int,
        jit: bool,
    ) -> None:
        self._client = client
        self._layout = layout
        self._shape = shape
        self._extents = layout.extents(shape)
        self._at_once = at_once
        self._is_whole = window.is_whole
        self._window = -(-window.size // at_once) * at_once
        self._run: Callable[..., Any] = self._fold_window
        if jit:
            self._run = tf.function(
                self._fold_window, jit_compile=True, autograph=False
            )

    def prepare(self, data: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the data of clients as `fold` takes it.

        For each of the extents its rows, no fewer than a window has; then for each
        where a window with a client begins; then where in that the client's rows begin.
        Where fewer rows than a window follow a client, some come before.
        """
        rows: list[tf.Tensor] = []
        begins: list[tf.Tensor] = []
        places: list[tf.Tensor] = []
        for extent in self._extents:
            laid, size = data[extent.tensor], self._window * extent.num_rows
            padded = _pad_to(laid, size)
            last = tf.shape(padded, tf.int64)[0] - size
            starts = (
                tf.range(tf.shape(laid, tf.int64)[0])
                if extent.place is None
                else data[-1][:, extent.place, 0]
            )
            begin = tf.minimum(starts, last)
            rows.append(padded)
            begins.append(begin)
            places.append(starts - begin)
        return [*rows, *begins, *places]

    def fold(
        self,
        clients: tuple[tf.Tensor, tf.Tensor],
        accumulators: Sequence[tf.Tensor],
        constants: Sequence[tf.Tensor],
        data: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Return the accumulators after some clients.

        Args:
            clients: the first of them, and one past the last, i64[]; at least one.
            accumulators: before the first.
            constants: the same for all.
            data: of all clients, prepared.
        """
        first, stop = clients

        def step(index: tf.Tensor, *held: tf.Tensor) -> list[tf.Tensor]:
            count = stop - index
            if not self._is_whole:
                count = tf.minimum(count, self._window)
            rows, places = self._rows(data, index)
            folded = self._run(count, held, constants, rows, places)
            return [index + self._window, *folded]

        if self._is_whole:
            return step(first, *accumulators)[1:]
        return _count_to(stop, step, [first, *accumulators])[1:]

    def _rows(
        self, data: Sequence[tf.Tensor], index: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the rows of the window with a client, and where it begins in them.

        Slices are no copies, where rows are aligned.
        """
        size = len(self._extents)
        begins, places = (
            [tf.gather(tensor, index) for tensor in data[start : start + size]]
            for start in (size, 2 * size)
        )
        rows = [
            _slice(laid, begin, self._window * extent.num_rows)
            for laid, begin, extent in zip(data, begins, self._extents, strict=False)
        ]
        return rows, places

    def _fold_window(
        self,
        count: tf.Tensor,
        accumulators: Sequence[tf.Tensor],
        constants: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        starts: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Return the accumulators after `count` clients, whose rows begin at starts."""
        # Loops of a computation are more than TensorFlow vectorises.
        # XLA, and work on several clients at once, has bits of its own anyway.
        work = Grafts(allowed="none", unrolled=self._at_once > 1, isolated=False)
        fold = Grafts(allowed="none", isolated=False)

        @tf.autograph.experimental.do_not_convert
        def run(taken: Sequence[tf.Tensor]) -> list[Any]:
            member = self._layout.alike(list(taken), self._shape)
            return flatten_all(self._client.work(work, constants, member))

        def run_one(index: tf.Tensor, *state: tf.Tensor) -> list[Any]:
            places, held = state[:size], state[size:]
            worked = run(self._take(rows, places, 1, []))
            folded = self._client.fold(fold, held, worked, constants)
            return [index + 1, *self._after(places, 1), *folded]

        def run_some(index: tf.Tensor, *state: tf.Tensor) -> list[Any]:
            places, folded = state[:size], list(state[size:])
            taken = self._take(rows, places, at_once, [at_once])
            some: Any = tf.vectorized_map(run, taken, fallback_to_while_loop=False)
            for position in range(at_once):
                worked = [tensor[position] for tensor in some]
                folded = self._client.fold(fold, folded, worked, constants)
            return [index + at_once, *self._after(places, at_once), *folded]

        # XLA compiles anew for each place that it finds fixed in a slice: they move.
        size, at_once = len(starts), self._at_once
        state = [tf.zeros([], tf.int64), *starts, *accumulators]
        if at_once > 1:
            state = _count_to(count // at_once * at_once, run_some, state)
        return _count_to(count, run_one, state)[1 + size :]

    def _take(
        self,
        rows: Sequence[tf.Tensor],
        places: Sequence[tf.Tensor],
        number: int,
        lead: list[int],
    ) -> list[tf.Tensor]:
        """Return the values of so many clients, from places in the rows on."""
        taken: list[tf.Tensor] = []
        for tensor, place, each in zip(rows, places, self._extents, strict=True):
            part = _slice(tensor, place, number * each.num_rows)
            taken.append(tf.reshape(part, [*lead, *each.shape]))
        return taken

    def _after(self, places: Sequence[tf.Tensor], number: int) -> list[tf.Tensor]:
        """Return the places of the clients after so many."""
        return [
            place + number * each.num_rows
            for place, each in zip(places, self._extents, strict=True)
        ]


def flatten_all(members: Sequence[Any]) -> list[Any]:
    """Return the tensors of some values, in order."""
    return [tensor for member in members for tensor in flatten(member)]


def _slice(rows: tf.Tensor, begin: tf.Tensor, size: int) -> tf.Tensor:
    """Return so many rows from one on."""
    begins = [begin, *[tf.zeros([], tf.int64)] * (len(rows.shape) - 1)]
    return tf.slice(rows, tf.stack(begins), [size, *rows.shape[1:]])


def _pad_to(rows: tf.Tensor, size: int) -> tf.Tensor:
    """Return rows with others behind them, where they are fewer than so many."""
    missing = size - tf.shape(rows, tf.int64)[0]

    def padded() -> tf.Tensor:
        pads = [[0, missing], *[[0, 0]] * (len(rows.shape) - 1)]
        return tf.pad(rows, tf.convert_to_tensor(pads, tf.int64))

    filled: Any = tf.cond(missing > 0, padded, lambda: rows)
    return tf.ensure_shape(filled, rows.shape)


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
