"""Data of many clients as tensors of one batch, whatever their shapes.

What a `ColumnarSequence` is for elements, once more for clients: their tensors and
sequences lie end to end, with splits where sizes differ. So nothing is padded, and
clients of any sizes fit one trace. The data is laid once and may serve many rounds; the
random states belong to one round.

    f32[784]         f32[clients, 784]
    f32[?, 784]      f32[sum, 784]; places: start and stop
    f32[784]*        f32[sum, 784]; places: length, start and stop of elements
    f32[?, 784]*     f32[sum, 784], all clients' splits i64[sum + clients]; places:
                     length, start and stop of elements, of splits and of rows

All clients' places are one table, i64[clients, places, 1]: two ops get those of a
client, in the rank that slicing takes. Each op counts in a loop over small clients.

A leaf's clients may all be of one shape. Then several may work at once, or XLA compile
their work. Both want sizes that are known when traced, so there is a graph for each
shape; and both may give other bits than one client at a time. So what is in a leaf, as
a whole, decides how it runs, and the bits depend on settings and data alone.

    clients of a leaf      0 1 2 3 4 5 6          k = 3
    window of rows         [. 0 1 2 3 4 5 6]      of a fixed number of clients
    at once                (0 1 2) (3 4 5) 6      work; accumulated in order
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import ray_fed.plan.plans as plans
import ray_fed.tensorflow.external_data as external_data
from ray_fed.language import blocks, structs, type_checks
from ray_fed.language.structs import Plain
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.kernels.graph_builder import (
    GraphBuilder,
    GraphImporter,
    GraphSequence,
    flatten,
    leaf_types,
    parameter_of,
    specs_of,
)
from ray_fed.tensorflow.kernels.graph_functions import (
    as_tensor,
    before,
    concatenate,
    count_bytes,
)
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import columnar_sequence, stored, tensor_structures
from ray_fed.values.columnar_sequence import ColumnarSequence

Array = NDArray[Any]
Parts = Sequence[Array]
"""What is to lie end to end in one tensor, client after client."""

ComponentShape: TypeAlias = tuple[int, ...] | columnar_sequence.Sizes
"""The sizes of one client's component: the dimensions of a tensor, or the `Sizes` of a
sequence."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """Where the rows of clients of one shape lie in a tensor.

    Attributes:
        tensor: position among those of the layout.
        place: where a client's rows start, by position among its places; None: at the
            client's index.
        num_rows: of each client.
        shape: that these rows have as one client's value.
    """

    tensor: int
    place: int | None
    num_rows: int
    shape: tuple[int, ...]


def _column_spec(type_spec: fl.TensorType) -> tuple[tf.TensorSpec, bool]:
    """Return what `specs.column_spec` says of clients' data.

    Raises:
        Fallback: these have no such form.
    """
    column = specs.column_spec(type_spec)
    if column is None:
        raise Fallback(f"client data of type `{type_spec}`")
    return column


def _bounds(lengths: Sequence[int]) -> list[Array]:
    """Return where each client's part starts, and where it stops."""
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    return [ends[:-1], ends[1:]]


def _part(laid: tf.Tensor, places: Iterator[tf.Tensor]) -> tf.Tensor:
    start, stop = next(places), next(places)
    return tf.strided_slice(laid, start, stop, np.ones(1, np.int64))


class TensorLayout:
    """One tensor a client."""

    def __init__(self, type_spec: fl.TensorType) -> None:
        self._type_spec = type_spec
        spec, self._has_splits = _column_spec(type_spec)
        self.specs = [spec]
        self.num_places = 2 if self._has_splits else 0

    def lay(
        self, members: Sequence[Plain], keep: external_data.Keep
    ) -> tuple[list[Parts], list[Array]]:
        """Return the arrays of these clients as `specs` says, and their places."""
        del keep  # no kernel takes tensors in files
        dtype = tensor_structures.storage_dtype(self._type_spec)
        column = columnar_sequence.lay_column(members, dtype, self._type_spec.shape)
        if column.splits is None:
            return [[column.rows]], []
        return [[column.rows]], [column.splits[:-1], column.splits[1:]]

    def sizes(self, laid: Sequence[tf.Tensor], places: Array) -> Array | None:
        """Return what of each client's shape the type does not say; None for strings.

        Args:
            laid: as `specs` says.
            places: i64[clients, places].
        """
        if laid[0].dtype == tf.string:
            return None
        if not self._has_splits:
            return np.empty((len(laid[0]), 0), np.int64)
        return places[:, 1:2] - places[:, :1]

    def shape_of(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the dimensions of a client's tensor, from what `sizes` gave."""
        dims = cast("tuple[int, ...]", tuple(self._type_spec.shape or ()))
        return (*sizes, *dims[1:]) if self._has_splits else dims

    def extents(self, shape: tuple[int, ...]) -> list[Extent]:
        """Return where the tensors of clients of a shape lie."""
        if self._has_splits:
            return [Extent(0, 0, shape[0], shape)]
        return [Extent(0, None, 1, shape)]

    def static_member(
        self, rows: Iterator[tf.Tensor], shape: tuple[int, ...]
    ) -> tf.Tensor:
        """Return one client's tensor, of what `extents` says."""
        del shape
        return next(rows)

    def member(
        self, laid: Iterator[tf.Tensor], places: Iterator[tf.Tensor], index: tf.Tensor
    ) -> tf.Tensor:
        """Return one client's tensor."""
        if self._has_splits:
            return _part(next(laid), places)
        return tf.gather(next(laid), index)


class SequenceLayout:
    """One sequence a client; its columns as `rows` lays them."""

    def __init__(self, type_spec: fl.SequenceType) -> None:
        self._type_spec = type_spec
        self._types = tensor_structures.flatten_type(type_spec.element)
        columns = list(map(_column_spec, self._types))
        self._have_splits = [has_splits for _, has_splits in columns]
        self.specs: list[tf.TensorSpec] = []
        for spec, has_splits in columns:
            self.specs += [spec, *[specs.SPLITS] * has_splits]
        self.num_places = 5 + 2 * sum(self._have_splits)

    def lay(
        self, members: Sequence[Plain], keep: external_data.Keep
    ) -> tuple[list[Parts], list[Array]]:
        """Return the arrays of these clients as `specs` says, and their places.

        Args:
            members: plain values. Sequences in files are read.
            keep: keeps what files hold.

        Raises:
            Fallback: those in files are larger than what is laid at once.
        """
        sequences = list(self._read_sequences(members, keep))
        laid: list[Parts] = []
        lengths = np.array([sequence.length for sequence in sequences], np.int64)
        elements = _bounds(lengths.tolist())
        shift = np.arange(len(sequences))  # a split more than elements
        of_splits = [elements[0] + shift, elements[1] + shift + 1]
        places = [lengths, *elements, *of_splits]
        for index, type_spec in enumerate(self._types):
            columns = [sequence.columns[index] for sequence in sequences]
            laid.append([column.rows for column in columns] or [_no_rows(type_spec)])
            if self._have_splits[index]:
                splits = [c.splits for c in columns if c.splits is not None]
                laid.append([np.empty(0, np.int64), *splits])
                places.extend(_bounds([len(column.rows) for column in columns]))
        return laid, places

    def _read_sequences(
        self, members: Sequence[Plain], keep: external_data.Keep
    ) -> Iterator[ColumnarSequence]:
        num_bytes = 0
        for member in members:
            sequence = member
            if isinstance(member, stored.External):
                sequence = external_data.read_cached(member.uri, self._type_spec, keep)
                num_bytes += getattr(sequence, "num_bytes", 0)
                if num_bytes > external_data.SMALL_BYTES:
                    raise Fallback("many rows in files")
            if not isinstance(sequence, ColumnarSequence):
                raise Fallback("a sequence that is read as it goes")
            yield sequence

    def sizes(self, laid: Sequence[tf.Tensor], places: Array) -> Array | None:
        """Return the length of each client's sequence, and its elements' dimensions.

        Those are -1 where its elements differ. None for strings.

        Args:
            laid: as `specs` says.
            places: i64[clients, places].
        """
        if any(tensor.dtype == tf.string for tensor in laid):
            return None
        lengths = places[:, :1]
        all_sizes, tensors, place = [lengths], iter(laid), 5
        for has_own_splits in self._have_splits:
            next(tensors)
            if has_own_splits:
                splits = next(tensors).numpy()
                num_rows = places[:, place + 1] - places[:, place]
                all_sizes.append(_batch_sizes(splits, places[:, 3], num_rows, lengths))
                place += 2
        return np.concatenate(all_sizes, axis=1)

    def shape_of(self, sizes: Sequence[int]) -> columnar_sequence.Sizes | None:
        """Return a client's shape, from what `sizes` gave, or None."""
        if -1 in sizes:
            return None
        length, *batches = sizes
        left = iter(batches)
        return columnar_sequence.Sizes(
            length,
            tuple(next(left) if splits else None for splits in self._have_splits),
        )

    def extents(self, sizes: columnar_sequence.Sizes) -> list[Extent]:
        """Return where the columns of clients of a shape lie."""
        regions: list[Extent] = []
        tensor, place = 0, 5
        for type_spec, batch in zip(self._types, sizes.batches, strict=True):
            inner = cast("tuple[int, ...]", tuple(type_spec.shape or ()))
            if batch is None:
                shape = (sizes.length, *inner)
                regions.append(Extent(tensor, 1, sizes.length, shape))
                tensor += 1
            else:
                shape = (sizes.length, batch, *inner[1:])
                regions.append(Extent(tensor, place, sizes.length * batch, shape))
                tensor, place = tensor + 2, place + 2
        return regions

    def static_member(
        self, rows: Iterator[tf.Tensor], sizes: columnar_sequence.Sizes
    ) -> GraphSequence:
        """Return one client's sequence, of what `extents` says."""
        return GraphSequence(tuple(next(rows) for _ in self._types), None, sizes)

    def member(
        self, laid: Iterator[tf.Tensor], places: Iterator[tf.Tensor], index: tf.Tensor
    ) -> GraphSequence:
        """Return one client's sequence."""
        del index
        length = tf.reshape(next(places), [])
        elements, of_splits = ([next(places), next(places)] for _ in range(2))
        columns: list[tf.Tensor] = []
        for has_own_splits in self._have_splits:
            if has_own_splits:
                columns.append(_part(next(laid), places))
                columns.append(_part(next(laid), iter(of_splits)))
            else:
                columns.append(_part(next(laid), iter(elements)))
        return GraphSequence(tuple(columns), length)


def _batch_sizes(
    splits: Array, starts: Array, num_rows: Array, lengths: Array
) -> Array:
    """Return the size of each client's elements, -1 where they are of several.

    Args:
        splits: of all clients, each from 0 on.
        starts: where each client's splits start.
        num_rows: of each client.
        lengths: number of elements of each, i64[clients, 1].
    """
    counts = lengths[:, 0]
    sizes = num_rows // np.maximum(counts, 1)
    owners = np.repeat(np.arange(len(counts)), counts + 1)
    expected = (np.arange(len(splits)) - starts[owners]) * sizes[owners]
    differing = owners[splits != expected]
    sizes[differing] = -1
    return sizes[:, np.newaxis]


def _no_rows(type_spec: fl.TensorType) -> Array:
    shape = [size for size in type_spec.shape or () if size is not None]
    return np.empty((0, *shape), tensor_structures.storage_dtype(type_spec))


ClientShape: TypeAlias = tuple[ComponentShape, ...]
"""The sizes of all components of a client's data. Clients of one shape lie at equal
distances."""


@dataclasses.dataclass(frozen=True)
class LaidPart:
    """One part of the data of some clients, in client order.

    Attributes:
        tensors: of all clients, end to end.
        places: i64[clients, places], those of this part.
    """

    tensors: Sequence[tf.Tensor]
    places: Array

    def count_bytes(self) -> int:
        """Return about how many bytes it holds."""
        return sum(map(count_bytes, self.tensors)) + self.places.nbytes


class ClientLayout:
    """The values of one type that each client has: a struct, whose elements are parts.

    Args:
        type_spec: of one client's value.

    Attributes:
        specs: of the tensors of any number of clients.

    Raises:
        Fallback: values of the type are laid out in no way that this module knows.
    """

    def __init__(self, type_spec: fl.StructType) -> None:
        self._type_spec = type_spec
        self._parts = [
            [
                TensorLayout(leaf)
                if isinstance(leaf, fl.TensorType)
                else SequenceLayout(leaf)
                for leaf in leaf_types(part)
            ]
            for _, part in type_spec.items()
        ]
        self._leaves = [leaf for part in self._parts for leaf in part]
        self._num_places = sum(leaf.num_places for leaf in self._leaves)
        self.specs = [spec for leaf in self._leaves for spec in leaf.specs]
        if self._num_places:
            self.specs.append(tf.TensorSpec([None, self._num_places, 1], tf.int64))

    def lay_part(
        self, part: int, values: Sequence[Plain], keep: external_data.Keep
    ) -> LaidPart:
        """Lay one part of the data of some clients.

        Args:
            part: index of the part in a client's value.
            values: what each client has there, plain, in client order.
            keep: keeps what files hold.
        """
        flat = [tensor_structures.flatten(value) for value in values]
        tensors: list[tf.Tensor] = []
        places: list[Array] = []
        for index, leaf in enumerate(self._parts[part]):
            laid, where = leaf.lay([leaves[index] for leaves in flat], keep)
            tensors += [
                concatenate(arrays, spec.dtype)
                for arrays, spec in zip(laid, leaf.specs, strict=True)
            ]
            places += where
        nowhere = np.empty((len(values), 0), np.int64)
        return LaidPart(tensors, np.stack(places, axis=1) if places else nowhere)

    def join(self, parts: Sequence[LaidPart]) -> list[tf.Tensor]:
        """Return the tensors of some clients, of all of their parts in order."""
        tensors = [tensor for part in parts for tensor in part.tensors]
        if self._num_places:
            places = np.concatenate([part.places for part in parts], axis=1)
            tensors.append(as_tensor(places[:, :, np.newaxis], tf.int64))
        return tensors

    def shapes(
        self, tensors: Sequence[tf.Tensor]
    ) -> tuple[list[ClientShape | None], NDArray[np.intp]]:
        """Return the shapes of clients whose data were laid, and which each one has.

        None stands for a client without one. Nothing at all where none can have one.
        """
        places = np.empty((0, 0), np.int64)
        if self._num_places:
            places = tensors[-1].numpy()[:, :, 0]
        by_leaf: list[Array] = []
        tensor, place = 0, 0
        for leaf in self._leaves:
            laid = tensors[tensor : tensor + len(leaf.specs)]
            sizes = leaf.sizes(laid, places[:, place : place + leaf.num_places])
            if sizes is None:
                return [], np.empty(0, np.intp)
            by_leaf.append(sizes)
            tensor, place = tensor + len(leaf.specs), place + leaf.num_places
        if not by_leaf:
            return [], np.empty(0, np.intp)
        ends = np.cumsum([sizes.shape[1] for sizes in by_leaf])
        by_leaf.append(
            np.zeros((len(by_leaf[0]), 1), np.int64)
        )  # there may be no other
        different, which = np.unique(
            np.concatenate(by_leaf, axis=1), axis=0, return_inverse=True
        )
        shapes = [self._shape_of(np.split(row, ends)[:-1]) for row in different]
        return shapes, which.reshape(-1)

    def _shape_of(self, sizes: Sequence[Array]) -> ClientShape | None:
        shapes = [
            leaf.shape_of(part.tolist())
            for leaf, part in zip(self._leaves, sizes, strict=True)
        ]
        return None if None in shapes else cast("ClientShape", tuple(shapes))

    def extents(self, shape: ClientShape) -> list[Extent]:
        """Return where the rows of clients of a shape lie."""
        regions: list[Extent] = []
        tensor, place = 0, 0
        for leaf, sizes in zip(self._leaves, shape, strict=True):
            for extent in leaf.extents(cast("Any", sizes)):
                shifted = None if extent.place is None else place + extent.place
                regions.append(
                    dataclasses.replace(
                        extent, tensor=tensor + extent.tensor, place=shifted
                    )
                )
            tensor, place = tensor + len(leaf.specs), place + leaf.num_places
        return regions

    def static_member(self, rows: Sequence[tf.Tensor], shape: ClientShape) -> Any:
        """Return the value of one client of a shape.

        Args:
            rows: its own, of each of `extents`, inside of a graph.
            shape: of the client.
        """
        remaining = iter(rows)
        leaves = [
            leaf.static_member(remaining, cast("Any", sizes))
            for leaf, sizes in zip(self._leaves, shape, strict=True)
        ]
        return tensor_structures.unflatten(iter(leaves), self._type_spec)

    def member(self, tensors: Sequence[tf.Tensor], index: tf.Tensor) -> Any:
        """Return one client's value: tensors and `GraphSequence`s in structs.

        Args:
            tensors: of all clients, inside of a graph.
            index: of the client among them, i64[].
        """
        laid, places = iter(tensors), iter(self._places(tensors, index))
        leaves = [leaf.member(laid, places, index) for leaf in self._leaves]
        return tensor_structures.unflatten(iter(leaves), self._type_spec)

    def _places(
        self, tensors: Sequence[tf.Tensor], index: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        if not self._num_places:
            return []
        places: Any = tf.unstack(tf.gather(tensors[-1], index), self._num_places)
        return places


_MOST_IN_WINDOW = 64
"""Clients whose rows one step takes; XLA compiles for a fixed number."""


class ClientWork:
    """The functions of a kernel, and the types of what goes through them.

    Args:
        kernel: what the compiler planned.

    Attributes:
        constants: type of the values that are the same for all clients.
        partial: type of the accumulators.
        kept: type of the values that are kept of each client.
        layout: of the clients' data.
        specs: of the accumulators.

    Raises:
        Fallback: there are values that no kernel takes.
    """

    def __init__(self, kernel: plans.Kernel) -> None:
        self._work = blocks.parse_block(kernel.work)
        self._accumulate = blocks.parse_block(kernel.accumulate)
        client = type_checks.struct_type(parameter_of(self._work))
        self.constants = type_checks.struct_type(client[0])
        self.layout = ClientLayout(type_checks.struct_type(client[1]))
        self.partial = type_checks.struct_type(parameter_of(self._accumulate))[0]
        result = type_checks.function_type(self._work.type_signature).result
        worked = list(type_checks.struct_type(result).items())
        self._worked = fl.StructType(worked[: kernel.num_aggregations])
        self.kept = fl.StructType(worked[kernel.num_aggregations :])
        self.specs = specs_of(self.partial)

    def work(
        self, importer: GraphImporter, constants: Sequence[tf.Tensor], member: Any
    ) -> list[Any]:
        """Return what a client's value comes to, inside of a graph."""
        packed = tensor_structures.unflatten(iter(constants), self.constants)
        client = structs.Struct([(None, packed), (None, member)])
        return list(GraphBuilder(importer).call(self._work, client))

    def fold(
        self,
        importer: GraphImporter,
        accumulators: Sequence[tf.Tensor],
        worked: Sequence[tf.Tensor],
        constants: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Return the accumulators after a client, inside of a graph.

        Args:
            importer: puts computations into it.
            accumulators: before the client.
            worked: the tensors of what `work` returned, but for what is kept.
            constants: the same for all.
        """
        folded = structs.Struct(
            [
                (None, tensor_structures.unflatten(iter(accumulators), self.partial)),
                (None, tensor_structures.unflatten(iter(worked), self._worked)),
                (None, tensor_structures.unflatten(iter(constants), self.constants)),
            ]
        )
        return flatten(GraphBuilder(importer).call(self._accumulate, folded))


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
        shape: of each client's.
        window: of rows that one step takes.
        at_once: how many clients' work runs vectorised.
        jit: whether XLA compiles it.
    """

    def __init__(
        self,
        client: ClientWork,
        shape: ClientShape,
        *,
        window: Window,
        at_once: int,
        jit: bool,
    ) -> None:
        self._client = client
        self._shape = shape
        self._extents = client.layout.extents(shape)
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

        def step(index: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
            count = stop - index
            if not self._is_whole:
                count = tf.minimum(count, self._window)
            rows, places = self._rows(data, index)
            folded = self._run(count, sums, constants, rows, places)
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
        work = GraphImporter(allowed="none", unrolled=self._at_once > 1, isolated=False)
        fold = GraphImporter(allowed="none", isolated=False)

        @tf.autograph.experimental.do_not_convert
        def run(member_rows: Sequence[tf.Tensor]) -> list[Any]:
            member = self._client.layout.static_member(list(member_rows), self._shape)
            return flatten_all(self._client.work(work, constants, member))

        def run_one(index: tf.Tensor, *state: tf.Tensor) -> list[Any]:
            places, sums = state[:size], state[size:]
            worked = run(self._take(rows, places, 1, []))
            folded = self._client.fold(fold, sums, worked, constants)
            return [index + 1, *self._after(places, 1), *folded]

        def run_some(index: tf.Tensor, *state: tf.Tensor) -> list[Any]:
            places, folded = state[:size], list(state[size:])
            window_rows = self._take(rows, places, at_once, [at_once])
            some: Any = tf.vectorized_map(
                run, window_rows, fallback_to_while_loop=False
            )
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
        values: list[tf.Tensor] = []
        for tensor, place, each in zip(rows, places, self._extents, strict=True):
            part = _slice(tensor, place, number * each.num_rows)
            values.append(tf.reshape(part, [*lead, *each.shape]))
        return values

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
    return tf.while_loop(
        before(stop),
        step,
        list(state),
        shape_invariants=[tensor.shape for tensor in state],
        parallel_iterations=1,
    )


@dataclasses.dataclass(frozen=True)
class UniformShape:
    """The key of a graph for leaves whose clients are all of one shape.

    Attributes:
        clients: the shape of each client.
        window: how many clients' rows one step of the graph takes.
    """

    clients: ClientShape
    window: Window


@dataclasses.dataclass(frozen=True)
class LaidData:
    """The data of some clients, for any round.

    Attributes:
        tensors: the data, laid as `ClientLayout` does.
        shapes: the different shapes of these clients; None stands for clients that
            have no shape.
        kinds: for each client the index of its shape in `shapes`; empty where shapes
            decide nothing.
    """

    tensors: Sequence[tf.Tensor]
    shapes: Sequence[ClientShape | None]
    kinds: NDArray[np.intp]

    @classmethod
    def of(
        cls,
        layout: ClientLayout,
        parts: Sequence[LaidPart],
        *,
        with_shapes: bool,
    ) -> "LaidData":
        """Put together the data of some clients.

        Args:
            layout: of the data of one client.
            parts: all that it has, of the same clients.
            with_shapes: whether to look for the shapes of the clients.
        """
        tensors = layout.join(parts)
        if with_shapes:
            return cls(tensors, *layout.shapes(tensors))
        return cls(tensors, [], np.empty(0, np.intp))

    def count_bytes(self) -> int:
        """Return about how many bytes the tensors hold."""
        return sum(map(count_bytes, self.tensors))


@dataclasses.dataclass(frozen=True)
class LaidClients:
    """The clients that one or several calls of a kernel cover, in one round.

    Attributes:
        states: the states of random ops in the clients' work, and of those in the
            accumulation: i64[clients, sites, 3] each.
        data: the data of the clients.
        shape: the shape of all clients of the leaves to fold; None where these leaves
            are folded by the graph for clients of any shape.
    """

    states: tuple[tf.Tensor, tf.Tensor]
    data: LaidData
    shape: UniformShape | None = None
