"""Values of many clients as tensors, and one client's out of them, inside of a graph.

What `rows` does for the elements of a sequence, once more for clients: tensors laid
end to end, with splits where sizes differ. So nothing is padded, and clients of any
sizes fit one trace.

    f32[784]         f32[clients, 784]
    f32[?, 784]      f32[sum, 784]; places: start and stop
    f32[784]*        f32[sum, 784]; places: length, start and stop of elements
    f32[?, 784]*     f32[sum, 784], all clients' splits i64[sum + clients]; places:
                     length, start and stop of elements, of splits and of rows

All clients' places are one table, i64[clients, places, 1]: two ops get those of a
client, in the rank that slicing takes. Each op counts in a loop over small clients.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ray_fed.language.structs import Plain, Struct
from ray_fed.tensorflow.tensors import copies, specs
from ray_fed.values import columnar_sequence, tensor_structures

Array = NDArray[Any]
Parts = Sequence[Array]
"""What is to lie end to end in one tensor, client after client."""


class UnfitError(Exception):
    """Client work cannot run in a kernel; the message is the reason, in few words."""


@dataclasses.dataclass(frozen=True)
class GraphSequence:
    """A sequence inside of a graph, in the layout of `rows`.

    Attributes:
        columns: of each column its rows and, where it has them, its splits.
        length: how many elements, i64[]; None with `sizes`.
        sizes: where they were known when traced; then columns have no splits, and the
            elements' dimension first.
    """

    columns: tuple[tf.Tensor, ...]
    length: tf.Tensor | None
    sizes: columnar_sequence.Sizes | None = None


ComponentShape: TypeAlias = tuple[int, ...] | columnar_sequence.Sizes
ClientShape: TypeAlias = tuple[ComponentShape, ...]
"""All sizes of a client's data: of each tensor its dimensions, of each sequence its
`Sizes`. Clients of one shape lie at equal distances."""


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


def leaf_types(type_spec: fl.Type) -> list[fl.TensorType | fl.SequenceType]:
    """Return the tensors and sequences of a structure, in order.

    Raises:
        UnfitError: it holds something else.
    """
    match type_spec:
        case fl.StructType():
            return [leaf for _, e in type_spec.items() for leaf in leaf_types(e)]
        case fl.TensorType() | fl.SequenceType():
            return [type_spec]
        case _:
            raise UnfitError(f"a value of type `{type_spec}`")


def lead_spec(type_spec: fl.TensorType, *, is_stacked: bool) -> tf.TensorSpec:
    """Return the spec of many tensors of a type: stacked, or laid end to end."""
    shape = specs.to_spec(type_spec).shape
    inner = shape if is_stacked else shape[1:]
    return tf.TensorSpec(tf.TensorShape([None]) + inner, specs.to_tf_dtype(type_spec))


def has_splits(type_spec: fl.TensorType) -> bool:
    """Return whether tensors of a type are laid end to end with splits.

    Raises:
        UnfitError: they are neither that nor of one fixed shape.
    """
    shape = type_spec.shape
    if shape is None or None in shape[1:]:
        raise UnfitError(f"client data of type `{type_spec}`")
    return None in shape


_SPLITS = tf.TensorSpec([None], tf.int64)


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
        self._has_splits = has_splits(type_spec)
        self.specs = [lead_spec(type_spec, is_stacked=not self._has_splits)]
        self.num_places = 2 if self._has_splits else 0

    def lay(self, members: Sequence[Plain]) -> tuple[list[Parts], list[Array]]:
        """Return the arrays of these clients as `specs` says, and their places."""
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

    def alike(self, taken: Iterator[tf.Tensor], shape: tuple[int, ...]) -> tf.Tensor:
        """Return one client's tensor, of what `extents` says."""
        del shape
        return next(taken)

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
        self._types = tensor_structures.flatten_type(type_spec.element)
        self._have_splits = [has_splits(column) for column in self._types]
        self.specs: list[tf.TensorSpec] = []
        for column, splits in zip(self._types, self._have_splits, strict=True):
            self.specs.append(lead_spec(column, is_stacked=not splits))
            self.specs.extend([_SPLITS] * splits)
        self.num_places = 5 + 2 * sum(self._have_splits)

    def lay(
        self, members: Sequence[columnar_sequence.ColumnarSequence]
    ) -> tuple[list[Parts], list[Array]]:
        """Return the arrays of these clients as `specs` says, and their places."""
        laid: list[Parts] = []
        lengths = np.array([member.length for member in members], np.int64)
        elements = _bounds(lengths.tolist())
        shift = np.arange(len(members))  # a split more than elements
        of_splits = [elements[0] + shift, elements[1] + shift + 1]
        places = [lengths, *elements, *of_splits]
        for index, type_spec in enumerate(self._types):
            columns = [member.columns[index] for member in members]
            laid.append([column.rows for column in columns] or [_no_rows(type_spec)])
            if self._have_splits[index]:
                splits = [c.splits for c in columns if c.splits is not None]
                laid.append([np.empty(0, np.int64), *splits])
                places.extend(_bounds([len(column.rows) for column in columns]))
        return laid, places

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
        found, tensors, place = [lengths], iter(laid), 5
        for has_own_splits in self._have_splits:
            next(tensors)
            if has_own_splits:
                splits = next(tensors).numpy()
                num_rows = places[:, place + 1] - places[:, place]
                found.append(_batch_sizes(splits, places[:, 3], num_rows, lengths))
                place += 2
        return np.concatenate(found, axis=1)

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
        found: list[Extent] = []
        tensor, place = 0, 5
        for type_spec, batch in zip(self._types, sizes.batches, strict=True):
            inner = cast("tuple[int, ...]", tuple(type_spec.shape or ()))
            if batch is None:
                shape = (sizes.length, *inner)
                found.append(Extent(tensor, 1, sizes.length, shape))
                tensor += 1
            else:
                shape = (sizes.length, batch, *inner[1:])
                found.append(Extent(tensor, place, sizes.length * batch, shape))
                tensor, place = tensor + 2, place + 2
        return found

    def alike(
        self, taken: Iterator[tf.Tensor], sizes: columnar_sequence.Sizes
    ) -> GraphSequence:
        """Return one client's sequence, of what `extents` says."""
        return GraphSequence(tuple(next(taken) for _ in self._types), None, sizes)

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


class ClientLayout:
    """The values of one type that each client has.

    Args:
        type_spec: of one client's value.

    Attributes:
        specs: of the tensors of any number of clients.

    Raises:
        UnfitError: values of the type are laid out in no way that this module knows.
    """

    def __init__(self, type_spec: fl.Type) -> None:
        self._type_spec = type_spec
        self._leaves = [
            TensorLayout(leaf)
            if isinstance(leaf, fl.TensorType)
            else SequenceLayout(leaf)
            for leaf in leaf_types(type_spec)
        ]
        self._num_places = sum(leaf.num_places for leaf in self._leaves)
        self.specs = [spec for leaf in self._leaves for spec in leaf.specs]
        if self._num_places:
            self.specs.append(tf.TensorSpec([None, self._num_places, 1], tf.int64))

    def lay(self, members: Sequence[Plain]) -> list[tf.Tensor]:
        """Return the tensors of some clients.

        Args:
            members: plain values, in client order.
        """
        flat = [tensor_structures.flatten(member) for member in members]
        found: list[Parts] = []
        places: list[Array] = []
        for index, leaf in enumerate(self._leaves):
            laid, where = leaf.lay([leaves[index] for leaves in flat])
            found += laid
            places += where
        if places:
            found.append([np.stack(places, axis=1)[:, :, np.newaxis]])
        return [
            copies.concatenate(parts, spec.dtype)
            for parts, spec in zip(found, self.specs, strict=True)
        ]

    def shapes(
        self, tensors: Sequence[tf.Tensor]
    ) -> tuple[list[ClientShape | None], NDArray[np.intp]]:
        """Return the shapes of clients whose data were laid, and which each one has.

        None stands for a client without one. Nothing at all where none can have one.
        """
        places = np.empty((0, 0), np.int64)
        if self._num_places:
            places = tensors[-1].numpy()[:, :, 0]
        found: list[Array] = []
        tensor, place = 0, 0
        for leaf in self._leaves:
            laid = tensors[tensor : tensor + len(leaf.specs)]
            sizes = leaf.sizes(laid, places[:, place : place + leaf.num_places])
            if sizes is None:
                return [], np.empty(0, np.intp)
            found.append(sizes)
            tensor, place = tensor + len(leaf.specs), place + leaf.num_places
        if not found:
            return [], np.empty(0, np.intp)
        ends = np.cumsum([sizes.shape[1] for sizes in found])
        found.append(np.zeros((len(found[0]), 1), np.int64))  # there may be no other
        different, which = np.unique(
            np.concatenate(found, axis=1), axis=0, return_inverse=True
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
        found: list[Extent] = []
        tensor, place = 0, 0
        for leaf, sizes in zip(self._leaves, shape, strict=True):
            for extent in leaf.extents(cast("Any", sizes)):
                shifted = None if extent.place is None else place + extent.place
                found.append(
                    dataclasses.replace(
                        extent, tensor=tensor + extent.tensor, place=shifted
                    )
                )
            tensor, place = tensor + len(leaf.specs), place + leaf.num_places
        return found

    def alike(self, taken: Sequence[tf.Tensor], shape: ClientShape) -> Any:
        """Return the value of one client of a shape.

        Args:
            taken: its rows, of each of `extents`, inside of a graph.
            shape: of the client.
        """
        remaining = iter(taken)
        leaves = [
            leaf.alike(remaining, cast("Any", sizes))
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
        found: Any = tf.unstack(tf.gather(tensors[-1], index), self._num_places)
        return found


def flatten(value: Any) -> list[Any]:
    """Return the tensors and sequences of a value inside of a graph, in order."""
    if isinstance(value, Struct):
        return [leaf for member in value for leaf in flatten(member)]
    return [value]
