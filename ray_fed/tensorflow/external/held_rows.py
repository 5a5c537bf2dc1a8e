"""Sequences in files, read at once, for graphs that take rows as tensors."""

import math
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

import ray_fed.tensorflow.tensors.datasets as datasets
from ray_fed.files.opening import DataFile
from ray_fed.language import type_checks
from ray_fed.tensorflow.external import external_data, tfrecords
from ray_fed.tensorflow.graphs import callbacks
from ray_fed.values import (
    columnar_sequence,
    read_limits,
    tensor_structures,
)
from ray_fed.values.columnar_sequence import Column, ColumnarSequence

Keep: TypeAlias = Callable[
    [Hashable, frozenset[str], Callable[[], Any], Callable[[Any], float]], Any
]
"""Returns what is kept under a key, or makes it: `ClientStore.keep`."""

SMALL_BYTES = 128 * 2**20
"""Rows of files that are in memory at once; larger sequences are read as they go."""


def read_if_small(
    uri: str, type_spec: fl.SequenceType
) -> "ColumnarSequence | tf.data.Dataset[Any]":
    """Open a file and return its rows; a dataset of them where they are many.

    Args:
        uri: as `external_data.data` takes it.
        type_spec: of the sequence.

    Raises:
        MissingFileError: the file is not there.
        ValueMismatchError: it does not hold what the type says.
        UnsupportedError: the format is none that is read, or needs packages.
    """
    file = DataFile.parse(uri)
    if file.suffix in tfrecords.SUFFIXES:
        return external_data.read(uri, type_spec)
    table, leaves = external_data.open_table(file, type_spec.element, is_sequence=True)
    if table.count_bytes(list(leaves)) > SMALL_BYTES:
        return external_data.read(uri, type_spec)
    parts: list[list[Column]] = [[_column([], leaf)] for leaf in leaves.values()]
    num_bytes = 0
    for chunk in external_data.chunks_of(file, table, leaves, rank=0):
        read_limits.check()
        for part, cells, leaf in zip(parts, chunk, leaves.values(), strict=True):
            part.append(_column(cells, leaf))
            num_bytes += columnar_sequence.count_column_bytes(part[-1])
        if num_bytes > SMALL_BYTES:
            return external_data.read(uri, type_spec)
    columns = tuple(columnar_sequence.join_columns(part) for part in parts)
    return ColumnarSequence(columns, columns[0].length)


def read_kept(
    uri: str, type_spec: fl.SequenceType, keep: Keep
) -> "ColumnarSequence | tf.data.Dataset[Any]":
    """Return what `read_if_small` does; of a file that did not change, what is kept.

    Args:
        uri: as `external_data.data` takes it.
        type_spec: of the sequence.
        keep: see `Keep`.

    Raises:
        As `read_if_small`.
    """
    stamp = DataFile.parse(uri).stamp()
    if stamp is None:
        return read_if_small(uri, type_spec)
    key = (uri, type_spec, stamp)
    return keep(key, frozenset(), lambda: read_if_small(uri, type_spec), _count_bytes)


def _count_bytes(found: Any) -> float:
    is_held = isinstance(found, ColumnarSequence)
    return found.num_bytes if is_held else math.inf  # a dataset holds nothing


def _column(cells: Any, leaf: fl.TensorType) -> Column:
    return columnar_sequence.lay_column(
        cells, tensor_structures.storage_dtype(leaf), leaf.shape
    )


class FileSequence(datasets.KnownSequence):
    """A sequence in a file, which is read anew whenever somebody asks for elements.

    Args:
        uri: as `external_data.data` takes it.
        type_spec: of the sequence.

    Raises:
        MissingFileError: the file is not there.
        ValueMismatchError: it does not hold what the type says.
        UnsupportedError: the format is none that is read, or needs packages.
    """

    def __init__(self, uri: str, type_spec: fl.SequenceType) -> None:
        self._uri, self._type_spec = uri, type_spec
        self._dataset = external_data.read(uri, type_spec)

    @property
    @override
    def dataset(self) -> "tf.data.Dataset[Any]":
        return self._dataset

    def hold(self) -> "datasets.HeldSequence | tf.data.Dataset[Any]":
        """Return the rows, read now; a dataset of them where they are many."""
        found = read_if_small(self._uri, self._type_spec)
        if isinstance(found, ColumnarSequence):
            return datasets.HeldSequence(found, self._type_spec.element)
        return found

    @override
    def as_sequence_of(self, element: fl.Type) -> Any:
        if element == self._type_spec.element:
            return self
        declared = fl.SequenceType(element)
        type_checks.check_assignable(declared, self._type_spec, "a sequence")
        return datasets.to_canonical(self._dataset, element)

    @override
    def elements(self) -> list[Any]:
        found = self._dataset
        return callbacks.call(datasets.to_elements, found, self._type_spec.element)
