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
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ray_fed.language.structs import Plain
from ray_fed.tensorflow.external import held_rows
from ray_fed.tensorflow.kernels.component_layouts import (
    Array,
    ComponentShape,
    Extent,
    SequenceLayout,
    TensorLayout,
)
from ray_fed.tensorflow.kernels.graph_values import leaf_types
from ray_fed.tensorflow.tensors import copies
from ray_fed.values import tensor_structures

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
        return sum(map(copies.count_bytes, self.tensors)) + self.places.nbytes


class ClientLayout:
    """The values of one type that each client has: a struct, whose elements are parts.

    Args:
        type_spec: of one client's value.

    Attributes:
        specs: of the tensors of any number of clients.

    Raises:
        UnfitError: values of the type are laid out in no way that this module knows.
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
        self, part: int, values: Sequence[Plain], keep: held_rows.Keep
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
                copies.concatenate(arrays, spec.dtype)
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
            tensors.append(copies.as_tensor(places[:, :, np.newaxis], tf.int64))
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
