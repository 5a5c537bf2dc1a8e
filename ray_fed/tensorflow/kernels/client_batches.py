"""The data of many clients as tensors, and the work on clients of one shape.

The rows of all clients are concatenated, so nothing is padded and one graph serves
clients of any sizes. If sizes differ, each client has *places*: the indices at which
its rows begin and end in these tensors. A *layout* describes the tensors and places of
a type. An element with a first dimension that may differ has *splits*: the index of the
first row of each element.

    one client       all clients
    f32[784]         f32[clients, 784]
    f32[?, 784]      f32[sum, 784]; places: start and stop
    f32[784]*        f32[sum, 784]; places: length, start and stop of elements
    f32[?, 784]*     f32[sum, 784], all clients' splits i64[sum + clients]; places:
                     length, start and stop of elements, of splits and of rows

The places of all clients are one table, i64[clients, places, 1]. Two ops read all
places of a client in the rank that slicing needs. The number of ops matters in a loop
over small clients.

A leaf is a few neighboring clients whose results are accumulated in order. If all
clients of a leaf have one shape, several can run at once, or XLA can compile their
work. Both need static shapes, so there is a graph for each shape. Both can have other
bits than one client at a time, so all clients of a leaf run in the same way. The bits
therefore depend on settings and data alone.

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
from ray_fed.language import blocks, structs, trees, type_checks
from ray_fed.language.structs import Plain
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.kernels.graph_builder import (
    GraphBuilder,
    GraphImporter,
    GraphSequence,
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
"""Arrays to concatenate to one tensor, in client order."""

ComponentShape: TypeAlias = tuple[int, ...] | columnar_sequence.Sizes
"""The sizes of a tensor or a sequence of a client: its dimensions, or its `Sizes`."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """The rows that each client has in one tensor, if all clients have one shape.

    Attributes:
        tensor: Index of the tensor in the layout's `specs`.
        place: Index among a client's places of the start of its rows. With None, the
            client's index is the start.
        num_rows: Number of rows of one client.
        shape: Shape of these rows as a value of one client.
    """

    tensor: int
    place: int | None
    num_rows: int
    shape: tuple[int, ...]


def _column_spec(type_spec: fl.TensorType) -> tuple[tf.TensorSpec, bool]:
    column = specs.column_spec(type_spec)
    if column is None:
        raise Fallback(f"client data of type `{type_spec}`")
    return column


def _bounds(lengths: Sequence[int]) -> list[Array]:
    ends = np.cumsum([0, *lengths], dtype=np.int64)
    return [ends[:-1], ends[1:]]


def _part(laid: tf.Tensor, places: Iterator[tf.Tensor]) -> tf.Tensor:
    start, stop = next(places), next(places)
    return tf.strided_slice(laid, start, stop, np.ones(1, np.int64))


class TensorLayout:
    """The layout of a value that is one tensor for each client."""

    def __init__(self, type_spec: fl.TensorType) -> None:
        self._type_spec = type_spec
        spec, self._has_splits = _column_spec(type_spec)
        self.specs = [spec]
        self.num_places = 2 if self._has_splits else 0

    def lay(
        self, members: Sequence[Plain], keep: external_data.Keep
    ) -> tuple[list[Parts], list[Array]]:
        """Return the arrays to concatenate to each tensor, and the columns of places.

        `members` has one plain value for each client.
        """
        del keep  # no kernel takes tensors in files
        dtype = tensor_structures.storage_dtype(self._type_spec)
        column = columnar_sequence.lay_column(members, dtype, self._type_spec.shape)
        if column.splits is None:
            return [[column.rows]], []
        return [[column.rows]], [column.splits[:-1], column.splits[1:]]

    def sizes(self, laid: Sequence[tf.Tensor], places: Array) -> Array | None:
        """Return the dimensions of each client's tensor that its type does not fix.

        They are i64[clients, dimensions], or None for strings. `laid` has the tensors
        that `specs` describes, and `places` is i64[clients, places].
        """
        if laid[0].dtype == tf.string:
            return None
        if not self._has_splits:
            return np.empty((len(laid[0]), 0), np.int64)
        return places[:, 1:2] - places[:, :1]

    def shape_of(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a client's tensor. `sizes` is a row of `self.sizes`."""
        dims = cast("tuple[int, ...]", tuple(self._type_spec.shape or ()))
        return (*sizes, *dims[1:]) if self._has_splits else dims

    def extents(self, shape: tuple[int, ...]) -> list[Extent]:
        """Return the extents of clients of one shape."""
        if self._has_splits:
            return [Extent(0, 0, shape[0], shape)]
        return [Extent(0, None, 1, shape)]

    def static_member(
        self, rows: Iterator[tf.Tensor], shape: tuple[int, ...]
    ) -> tf.Tensor:
        """Return one client's tensor. The next of `rows` has its rows."""
        del shape
        return next(rows)

    def member(
        self, laid: Iterator[tf.Tensor], places: Iterator[tf.Tensor], index: tf.Tensor
    ) -> tf.Tensor:
        """Return the tensor of the client at `index`, in a graph.

        `laid` yields the tensors of all clients, and `places` the client's places.
        """
        if self._has_splits:
            return _part(next(laid), places)
        return tf.gather(next(laid), index)


class SequenceLayout:
    """The layout of a value that is one sequence for each client."""

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
        """Return the arrays to concatenate to each tensor, and the columns of places.

        Sequences in files are read, and `keep` caches their content. Raises Fallback if
        the data in files is too large, or a sequence is only readable by element.
        """
        sequences = list(self._read_sequences(members, keep))
        laid: list[Parts] = []
        lengths = np.array([sequence.length for sequence in sequences], np.int64)
        elements = _bounds(lengths.tolist())
        # Each client has one more split than it has elements.
        shift = np.arange(len(sequences))
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
                raise Fallback("a sequence that is read element by element")
            yield sequence

    def sizes(self, laid: Sequence[tf.Tensor], places: Array) -> Array | None:
        """Return the length of each client's sequence, and its elements' dimensions.

        They are i64[clients, sizes], or None for strings. The size -1 means that the
        client's elements differ. The arguments are as in `TensorLayout.sizes`.
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
        """Return the sizes of a client from a row of `self.sizes`, or None for -1."""
        if -1 in sizes:
            return None
        length, *batches = sizes
        left = iter(batches)
        return columnar_sequence.Sizes(
            length,
            tuple(next(left) if splits else None for splits in self._have_splits),
        )

    def extents(self, sizes: columnar_sequence.Sizes) -> list[Extent]:
        """Return the extents of clients of one shape."""
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
        """Return a client's sequence. The next of `rows` have its columns' rows."""
        return GraphSequence(tuple(next(rows) for _ in self._types), None, sizes)

    def member(
        self, laid: Iterator[tf.Tensor], places: Iterator[tf.Tensor], index: tf.Tensor
    ) -> GraphSequence:
        """Return one client's sequence, see `TensorLayout.member`."""
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
    # The size of a client whose elements differ is -1. Splits of elements of one size
    # are its multiples, and each client's splits begin with 0.
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
"""The sizes of all tensors and sequences of a client's data, in order."""


@dataclasses.dataclass(frozen=True)
class LaidPart:
    """One part of the data of some clients, in client order.

    `tensors` are concatenated over clients. `places` is i64[clients, places].
    """

    tensors: Sequence[tf.Tensor]
    places: Array

    def count_bytes(self) -> int:
        """Return the approximate bytes of the tensors and places."""
        return sum(map(count_bytes, self.tensors)) + self.places.nbytes


class ClientLayout:
    """The layout of the data of a client, a struct whose elements are called parts.

    `specs` describes the tensors of any number of clients. The constructor raises
    Fallback for a type without a layout.
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
        """Return the values of some clients for one part as tensors.

        `part` is the index of the part in a client's data. `keep` caches the content of
        files.
        """
        flat = [trees.flatten(value) for value in values]
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
        """Return the tensors that `specs` describes, from all parts of some clients."""
        tensors = [tensor for part in parts for tensor in part.tensors]
        if self._num_places:
            places = np.concatenate([part.places for part in parts], axis=1)
            tensors.append(as_tensor(places[:, :, np.newaxis], tf.int64))
        return tensors

    def shapes(
        self, tensors: Sequence[tf.Tensor]
    ) -> tuple[list[ClientShape | None], NDArray[np.intp]]:
        """Return the different shapes of clients, and each client's index among them.

        `tensors` is a result of `join`. A shape is None if elements of a client differ
        in size. Both results are empty if the type has no shapes, as with strings.
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
        # A column of zeros, because there may be no other column.
        by_leaf.append(np.zeros((len(by_leaf[0]), 1), np.int64))
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
        """Return the extents of clients of one shape."""
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
        """Return the value of one client. `rows` has the rows of its extents."""
        remaining = iter(rows)
        leaves = [
            leaf.static_member(remaining, cast("Any", sizes))
            for leaf, sizes in zip(self._leaves, shape, strict=True)
        ]
        return trees.unflatten(iter(leaves), self._type_spec)

    def member(self, tensors: Sequence[tf.Tensor], index: tf.Tensor) -> Any:
        """Return the value of the client at `index`, i64[], in a graph.

        It has tensors and `GraphSequence`s in structs. `tensors` is a result of `join`.
        """
        laid, places = iter(tensors), iter(self._places(tensors, index))
        leaves = [leaf.member(laid, places, index) for leaf in self._leaves]
        return trees.unflatten(iter(leaves), self._type_spec)

    def _places(
        self, tensors: Sequence[tf.Tensor], index: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        if not self._num_places:
            return []
        places: Any = tf.unstack(tf.gather(tensors[-1], index), self._num_places)
        return places


FAILED_CHECK = "ray_fed: a check of a client failed"
"""Part of the error if a check fails in a graph for clients of one shape. The leaf is
then interpreted, which raises the check's own error."""

_MOST_IN_WINDOW = 64
"""Maximum clients of a window. XLA compiles for a fixed number of clients."""


class ClientWork:
    """The functions of a kernel, and the types of their values.

    The constructor raises Fallback for a type that kernels do not support.

    Attributes:
        constants: Type of the values that are equal for all clients.
        partial: Type of the accumulators.
        kept: Type of the values that are returned for each client.
        layout: Layout of the clients' data.
        specs: Specs of the accumulators' tensors.
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
        """Return the results of the work of the client with the data `member`."""
        packed = trees.unflatten(iter(constants), self.constants)
        client = structs.Struct([(None, packed), (None, member)])
        return list(GraphBuilder(importer).call(self._work, client))

    def fold(
        self,
        importer: GraphImporter,
        accumulators: Sequence[tf.Tensor],
        worked: Sequence[tf.Tensor],
        constants: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Return the accumulators with the results of one client added.

        `worked` has the tensors of the results of `work`, without kept values.
        """
        folded = structs.Struct(
            [
                (None, trees.unflatten(iter(accumulators), self.partial)),
                (None, trees.unflatten(iter(worked), self._worked)),
                (None, trees.unflatten(iter(constants), self.constants)),
            ]
        )
        return trees.flatten(GraphBuilder(importer).call(self._accumulate, folded))


@dataclasses.dataclass(frozen=True)
class Window:
    """The number of clients of one step. It is whole if no leaf has more clients."""

    size: int
    is_whole: bool

    @classmethod
    def of(cls, leaf_size: int) -> "Window":
        """Return the window for a cohort whose largest leaf has `leaf_size` clients."""
        # The size is a power of two, so that cohorts of similar size share a graph.
        size = min(1 << (leaf_size - 1).bit_length(), _MOST_IN_WINDOW)
        return cls(size, leaf_size <= size)


class ShapedClients:
    """Accumulates clients of one shape, in a graph.

    Args:
        client: The clients' work.
        shape: The shape of their data.
        window: Number of clients whose rows one step takes.
        at_once: Number of clients whose work is vectorized.
        jit: Whether XLA compiles the work.
        trusts_sums: See `GraphImporter`.
    """

    def __init__(
        self,
        client: ClientWork,
        shape: ClientShape,
        *,
        window: Window,
        at_once: int,
        jit: bool,
        trusts_sums: bool,
    ) -> None:
        self._client = client
        self._trusts_sums = trusts_sums
        self._shape = shape
        self._extents = client.layout.extents(shape)
        self._at_once = at_once
        self._is_whole = window.is_whole
        self._window = -(-window.size // at_once) * at_once
        self._has_checks = False
        self._run: Callable[..., Any] = self._fold_window
        if jit:
            self._run = tf.function(
                self._fold_window, jit_compile=True, autograph=False
            )

    def prepare(self, data: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the data of all clients in the form that `fold` takes.

        The result has three groups of tensors, with one tensor for each extent. First
        are the rows, padded to at least one window. Second is the start of each
        client's window in these rows. Third is the start of the client's rows in its
        window. It is not 0 if fewer rows than a window follow the client.
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
        """Return the accumulators with the results of some clients added.

        `clients` has the first client and one past the last, i64[], at least one
        client. `constants` has the tensors that all clients share, and then numbers
        such as a learning rate, f64[numbers]. `data` is the result of `prepare`.
        """
        first, stop = clients

        def step(index: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
            count = stop - index
            if not self._is_whole:
                count = tf.minimum(count, self._window)
            rows, places = self._rows(data, index)
            passed, *folded = self._run(count, sums, constants, rows, places)
            if self._has_checks:
                # XLA has no assertions, so its graph returns whether all passed.
                check: Any = tf.debugging.Assert(passed, [FAILED_CHECK])
                with tf.control_dependencies([check]):
                    folded = list(map(tf.identity, folded))
            return [index + self._window, *folded]

        if self._is_whole:
            return step(first, *accumulators)[1:]
        return _count_to(stop, step, [first, *accumulators])[1:]

    def _rows(
        self, data: Sequence[tf.Tensor], index: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        # Slices of aligned rows are not copied.
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
        # The first result says whether all checks of the `count` clients passed.
        # Loops of a computation are unrolled, because TensorFlow cannot vectorize them.
        # Computations are not isolated: XLA and vectorized work have other bits anyway.
        work = GraphImporter(
            allowed="none",
            unrolled=self._at_once > 1,
            isolated=False,
            trusts_sums=self._trusts_sums,
        )
        fold = GraphImporter(allowed="none", isolated=False)
        *constants, work.numbers = constants
        fold.numbers = work.numbers

        @tf.autograph.experimental.do_not_convert
        def run(member_rows: Sequence[tf.Tensor]) -> list[Any]:
            member = self._client.layout.static_member(list(member_rows), self._shape)
            worked = flatten_all(self._client.work(work, constants, member))
            return [all_passed(work), *worked]

        def all_passed(importer: GraphImporter) -> tf.Tensor:
            passed = tf.ones([], tf.bool)
            while importer.checks:
                passed, self._has_checks = passed & importer.checks.pop(), True
            return passed

        def run_one(index: tf.Tensor, *state: tf.Tensor) -> list[Any]:
            places, passed, sums = state[:size], state[size], state[size + 1 :]
            worked_well, *worked = run(self._take(rows, places, 1, []))
            folded = self._client.fold(fold, sums, worked, constants)
            passed = passed & worked_well & all_passed(fold)
            return [index + 1, *self._after(places, 1), passed, *folded]

        def run_some(index: tf.Tensor, *state: tf.Tensor) -> list[Any]:
            places, passed, folded = state[:size], state[size], list(state[size + 1 :])
            window_rows = self._take(rows, places, at_once, [at_once])
            worked_well, *some = cast(
                "Any",
                tf.vectorized_map(run, window_rows, fallback_to_while_loop=False),
            )
            for position in range(at_once):
                worked = [tensor[position] for tensor in some]
                folded = self._client.fold(fold, folded, worked, constants)
            passed = passed & tf.reduce_all(worked_well) & all_passed(fold)
            return [index + at_once, *self._after(places, at_once), passed, *folded]

        # Starts are loop variables: XLA would compile again for each constant start.
        size, at_once = len(starts), self._at_once
        state = [tf.zeros([], tf.int64), *starts, tf.ones([], tf.bool), *accumulators]
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
        values: list[tf.Tensor] = []
        for tensor, place, each in zip(rows, places, self._extents, strict=True):
            part = _slice(tensor, place, number * each.num_rows)
            values.append(tf.reshape(part, [*lead, *each.shape]))
        return values

    def _after(self, places: Sequence[tf.Tensor], number: int) -> list[tf.Tensor]:
        return [
            place + number * each.num_rows
            for place, each in zip(places, self._extents, strict=True)
        ]


def flatten_all(members: Sequence[Any]) -> list[Any]:
    """Return the tensors of some values in nested structs, in order."""
    return [tensor for member in members for tensor in trees.flatten(member)]


def _slice(rows: tf.Tensor, begin: tf.Tensor, size: int) -> tf.Tensor:
    begins = [begin, *[tf.zeros([], tf.int64)] * (len(rows.shape) - 1)]
    return tf.slice(rows, tf.stack(begins), [size, *rows.shape[1:]])


def _pad_to(rows: tf.Tensor, size: int) -> tf.Tensor:
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
    """The key of a graph for leaves whose clients all have data of one shape."""

    clients: ClientShape
    window: Window


@dataclasses.dataclass(frozen=True)
class LaidData:
    """The data of some clients as tensors. Any round can use it.

    Attributes:
        tensors: The result of `ClientLayout.join`.
        shapes: The different shapes of the clients. None stands for no shape.
        kinds: For each client, the index of its shape. Empty if shapes are not needed.
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
        """Join the parts of some clients' data, and find shapes if `with_shapes`."""
        tensors = layout.join(parts)
        if with_shapes:
            return cls(tensors, *layout.shapes(tensors))
        return cls(tensors, [], np.empty(0, np.intp))

    def count_bytes(self) -> int:
        """Return the approximate bytes of the tensors."""
        return sum(map(count_bytes, self.tensors))


@dataclasses.dataclass(frozen=True)
class LaidClients:
    """The input of kernel calls for some clients in one round.

    Attributes:
        states: States of the random ops in the clients' work, and in the accumulation,
            i64[clients, random ops, 3] each.
        data: The clients' data.
        shape: The shape of all these clients, or None to use the graph for clients of
            any shape.
        are_checked: Whether to run the graph that checks the values of each client,
            instead of relying on sums over clients.
    """

    states: tuple[tf.Tensor, tf.Tensor]
    data: LaidData
    shape: UniformShape | None = None
    are_checked: bool = False
