"""One tensor or one sequence of each client, laid end to end with those of all clients.

`client_tensors` has the picture. A layout says which tensors hold a component of all
clients and which places each client has in the table of places; it takes the component
of one client out again, by these places or, where all clients are of one shape, by the
client's index.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ray_fed.language.structs import Plain
from ray_fed.tensorflow.external import held_rows
from ray_fed.tensorflow.kernels.graph_values import GraphSequence, UnfitError
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

    def lay(
        self, members: Sequence[Plain], keep: held_rows.Keep
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
        self._type_spec = type_spec
        self._types = tensor_structures.flatten_type(type_spec.element)
        self._have_splits = [has_splits(column) for column in self._types]
        self.specs: list[tf.TensorSpec] = []
        for column, splits in zip(self._types, self._have_splits, strict=True):
            self.specs.append(lead_spec(column, is_stacked=not splits))
            self.specs.extend([_SPLITS] * splits)
        self.num_places = 5 + 2 * sum(self._have_splits)

    def lay(
        self, members: Sequence[Plain], keep: held_rows.Keep
    ) -> tuple[list[Parts], list[Array]]:
        """Return the arrays of these clients as `specs` says, and their places.

        Args:
            members: plain values. Sequences in files are read.
            keep: keeps what files hold.

        Raises:
            UnfitError: those in files are larger than what is laid at once.
        """
        held = list(self._held(members, keep))
        laid: list[Parts] = []
        lengths = np.array([sequence.length for sequence in held], np.int64)
        elements = _bounds(lengths.tolist())
        shift = np.arange(len(held))  # a split more than elements
        of_splits = [elements[0] + shift, elements[1] + shift + 1]
        places = [lengths, *elements, *of_splits]
        for index, type_spec in enumerate(self._types):
            columns = [sequence.columns[index] for sequence in held]
            laid.append([column.rows for column in columns] or [_no_rows(type_spec)])
            if self._have_splits[index]:
                splits = [c.splits for c in columns if c.splits is not None]
                laid.append([np.empty(0, np.int64), *splits])
                places.extend(_bounds([len(column.rows) for column in columns]))
        return laid, places

    def _held(
        self, members: Sequence[Plain], keep: held_rows.Keep
    ) -> Iterator[ColumnarSequence]:
        num_bytes = 0
        for member in members:
            found = member
            if isinstance(member, stored.External):
                found = held_rows.read_kept(member.uri, self._type_spec, keep)
                num_bytes += getattr(found, "num_bytes", 0)
                if num_bytes > held_rows.SMALL_BYTES:
                    raise UnfitError("many rows in files")
            if not isinstance(found, ColumnarSequence):
                raise UnfitError("a sequence that is read as it goes")
            yield found

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
