"""External data: a name of a file as a value, and the file read as its type says.

    declared type            rows of parquet, arrow, npz (first dimension), TFRecord
    SequenceType             one element a row; read anew, and lazily, on every pass
    TensorType, StructType   whole columns: the first dimension is rows

Elements of structures are columns of their names, nested ones joined by dots; a
tensor alone is the column after the `#` of the name, else the file's only one.
Elements without names are `arr_0`, `arr_1` and so on, as `numpy.savez` names them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.files.tables as tables
import ray_fed.tensorflow.tensors.datasets as datasets
from ray_fed.files.opening import DataFile
from ray_fed.files.tables import ColumnSpec, NpyTable, NpzTable, Table
from ray_fed.language import blocks, structs
from ray_fed.tensorflow.external import tfrecords
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import tensor_structures
from ray_fed.values.columnar_sequence import Dims

_TABLES: Mapping[str, Callable[[DataFile], Table]] = {
    ".npy": NpyTable,
    ".npz": NpzTable,
    ".parquet": lambda file: tables.ArrowTable(file, is_parquet=True),
    ".arrow": lambda file: tables.ArrowTable(file, is_parquet=False),
    ".feather": lambda file: tables.ArrowTable(file, is_parquet=False),
}


def data(uri: object, type_spec: Any) -> fl.framework.Data:
    """Return a file as a value: read where it is used, when it is used.

    It may stand wherever a value of its type may: in the body of a computation, and in
    arguments, such as a list with one file for each client. Only the name travels.

    Args:
        uri: a path, or a URI of `file`, `memory`, or of a protocol of fsspec that
            `Config.data.protocols` names, in the file system of the executor; of a
            TFRecord, parquet, arrow, feather, npz or npy file; `#name` selects one
            column.
        type_spec: anything that converts to the type of the value.

    Raises:
        TypeError: `uri` is no text, or no file holds values of the type.
        CompileError: the type nests deeper than protobuf writes or reads.
    """
    found = specs.to_type(type_spec)
    _check_data_type(found)
    if not isinstance(uri, str) or not uri.isprintable():
        raise errors.ValueMismatchError(
            f"Expected a path or a URI as text, found {structs.show(uri)}."
        )
    with blocks.depth_in_words():
        blocks.parse_type(blocks.serialise_type(found))
    return blocks.data_block(uri, found)


def _check_data_type(type_spec: fl.Type) -> None:
    """Raise unless a file may hold values of a type, at all clients or the server."""
    inside = type_spec
    if isinstance(type_spec, fl.FederatedType) and type_spec.all_equal:
        inside = type_spec.member
    others = fl.framework.type_contains(
        inside,
        lambda part: (
            not isinstance(part, fl.TensorType | fl.StructType | fl.SequenceType)
        ),
    )
    if others:
        raise errors.ValueMismatchError(
            "Expected a type of tensors, structures and sequences for the value that a"
            f" file holds, found `{type_spec}`."
        )


def read(uri: str, type_spec: fl.Type) -> Any:
    """Open a file and return what it holds, as `normal.normalise` takes it.

    Args:
        uri: as `data` takes it.
        type_spec: a sequence of tensors or structures of them, or one of those alone.

    Returns:
        For a sequence a dataset, which reads rows as a caller iterates over it; else
        numpy arrays, in a tuple for a structure.

    Raises:
        MissingFileError: the file is not there.
        ValueMismatchError: it does not hold what the type says.
        UnsupportedError: the format is none that is read, or needs packages, or files
            of the protocol may not be read here.
    """
    file = DataFile.parse(uri)
    is_sequence = isinstance(type_spec, fl.SequenceType)
    element = type_spec.element if isinstance(type_spec, fl.SequenceType) else type_spec
    if file.suffix in tfrecords.SUFFIXES:
        leaves = dict(_leaves(file, element))
        return tfrecords.read(file, leaves, element, is_sequence=is_sequence)
    table, leaves = open_table(file, element, is_sequence=is_sequence)
    if is_sequence:
        return _dataset(file, table, leaves, element)
    return _whole(file, table, leaves, element)


def open_table(
    file: DataFile, element: fl.Type, *, is_sequence: bool
) -> tuple[Table, dict[str, fl.TensorType]]:
    """Return a file as a table, and name and type of each of its columns.

    Raises:
        MissingFileError: the file is not there.
        ValueMismatchError: it does not hold what the type says.
        UnsupportedError: the format is none that is read.
    """
    if file.suffix not in _TABLES:
        raise errors.UnsupportedError(
            "Expected a file that ends with one of"
            f" {sorted([*_TABLES, *tfrecords.SUFFIXES])}, found `{file.uri}`."
        )
    leaves = dict(_leaves(file, element))
    table = _TABLES[file.suffix](file)
    leaves = _named(file, leaves, table.specs)
    for name, tensor_type in leaves.items():
        _check_column(file, name, tensor_type, table.specs, is_sequence=is_sequence)
    lengths = {name: (table.specs[name].shape or (None,))[0] for name in leaves}
    if is_sequence and len(set(lengths.values())) > 1:
        raise file.mismatch("one number of rows in all columns", f"{lengths}")
    return table, leaves


def _leaves(
    file: DataFile, type_spec: fl.Type, path: str = ""
) -> Iterator[tuple[str, fl.TensorType]]:
    """Yield the column and the type of each tensor; "" is the only column."""
    match type_spec:
        case fl.TensorType():
            yield path or file.column or "", type_spec
        case fl.StructType():
            for index, (name, element) in enumerate(type_spec.items()):
                column = name or f"arr_{index}"  # as numpy.savez names them
                column = f"{path}.{column}" if path else column
                yield from _leaves(file, element, column)
        case _:
            raise file.mismatch(
                "a sequence, a structure of tensors or a tensor", f"`{type_spec}`"
            )


def _named(
    file: DataFile,
    leaves: dict[str, fl.TensorType],
    found: Mapping[str, ColumnSpec],
) -> dict[str, fl.TensorType]:
    if "" not in leaves:
        return leaves
    if len(found) != 1:
        raise file.mismatch(
            "one column, or the name of one after a `#`", f"the columns {list(found)}"
        )
    return {next(iter(found)): leaves[""]}


def _check_column(
    file: DataFile,
    name: str,
    declared: fl.TensorType,
    found: Mapping[str, ColumnSpec],
    *,
    is_sequence: bool,
) -> None:
    """Compare a column with a declared type as far as the file's schema goes."""
    if name not in found:
        raise file.mismatch(f"a column `{name}`", f"the columns {list(found)}")
    spec = found[name]
    shape = spec.shape if not is_sequence else spec.shape and spec.shape[1:]
    fits = is_sequence <= bool(spec.shape) and (
        _fits_flat(declared.shape, is_sequence=is_sequence)
        if spec.is_flat
        else _fits(shape, declared.shape)
    )
    if spec.dtype != tensor_structures.storage_dtype(declared) or not fits:
        of = "each row of " if is_sequence else ""
        raise file.mismatch(f"`{declared}` in {of}the column `{name}`", spec.label)


def _fits(found: Dims, declared: Dims) -> bool:
    if found is None or declared is None:
        return True
    return len(found) == len(declared) and all(
        None in (a, b) or a == b for a, b in zip(found, declared, strict=True)
    )


def _fits_flat(declared: Dims, *, is_sequence: bool) -> bool:
    """Return whether lists can be laid in a shape: only its first size is unknown."""
    if declared is None:
        return False
    cell = declared if is_sequence else declared[1:]
    return len(cell) > 0 and None not in cell[1:] and (is_sequence or None not in cell)


def chunks_of(
    file: DataFile, table: Table, leaves: Mapping[str, fl.TensorType], rank: int
) -> Iterator[list[Any]]:
    """Yield the cells of all columns, chunk by chunk, in their declared shapes.

    Args:
        file: for errors.
        table: the file, opened.
        leaves: name and type of each column; its shape is that of a cell after the
            first `1 - rank` dimensions.
        rank: 0 where the types are those of cells, 1 where of whole columns.
    """
    names = list(leaves)
    shapes = [leaf.shape and leaf.shape[rank:] for leaf in leaves.values()]
    for chunk in table.read(names, math.inf if rank else tables.CHUNK_BYTES):
        yield [
            _shaped(file, name, cells, shape) if table.specs[name].is_flat else cells
            for name, cells, shape in zip(names, chunk, shapes, strict=True)
        ]


def _shaped(file: DataFile, name: str, cells: Any, shape: Any) -> Any:
    sizes = [-1 if size is None else size for size in shape]
    try:
        shaped = [np.reshape(cell, sizes) for cell in cells]
    except ValueError as error:
        raise file.mismatch(
            f"lists that fill the shape {list(shape)} in the column `{name}`",
            f"lengths {sorted({len(cell) for cell in cells})[:4]}",
        ) from error
    return shaped if None in shape or not shaped else np.stack(shaped)


def _whole(
    file: DataFile,
    table: Table,
    leaves: Mapping[str, fl.TensorType],
    type_spec: fl.Type,
) -> Any:
    chunks = list(chunks_of(file, table, leaves, rank=1))
    arrays = [
        _joined([chunk[index] for chunk in chunks], leaf)
        for index, leaf in enumerate(leaves.values())
    ]
    for (name, leaf), array in zip(leaves.items(), arrays, strict=True):
        if not _fits(array.shape, leaf.shape):
            label = f"`{leaf}` as the column `{name}`"
            raise file.mismatch(label, f"the shape {list(array.shape)}")
    return tensor_structures.unflatten(iter(arrays), type_spec)


def _joined(cells: list[Any], declared: fl.TensorType) -> Any:
    if len(cells) == 1:
        return np.asarray(cells[0], tensor_structures.storage_dtype(declared))
    shape = [0 if size is None else size for size in (declared.shape or (0,))[1:]]
    empty = np.empty((0, *shape), tensor_structures.storage_dtype(declared))
    return np.concatenate(
        [empty, *(np.asarray(c, empty.dtype) for c in cells if len(c))]
    )


def _dataset(
    file: DataFile,
    table: Table,
    leaves: Mapping[str, fl.TensorType],
    element: fl.Type,
) -> "tf.data.Dataset[Any]":
    spec = datasets.element_spec(element)
    fixed = all(
        leaf.shape is not None and None not in leaf.shape for leaf in leaves.values()
    )

    def rows() -> Iterator[Any]:
        for chunk in chunks_of(file, table, leaves, rank=0):
            for row in zip(*chunk, strict=True):
                yield datasets.build(row, element)

    def batches() -> Iterator[Any]:
        for chunk in chunks_of(file, table, leaves, rank=0):
            yield datasets.build(chunk, element)

    if not fixed:
        return tf.data.Dataset.from_generator(rows, output_signature=spec)
    batched = tf.nest.map_structure(_batched, spec)
    chunked = tf.data.Dataset.from_generator(batches, output_signature=batched)
    return chunked.unbatch()


def _batched(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape], spec.dtype)
