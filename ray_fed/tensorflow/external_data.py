"""Reads data files: the name of a file can replace a value of a declared type.

    declared type            value of a Parquet, Arrow, CSV, JSON, npz or TFRecord file
    SequenceType             one element for each row, read again in each pass, lazily
    TensorType, StructType   whole columns: the first dimension is rows

The elements of a structure are columns with the same names. Nested names are joined by
dots. An element without a name is a column `arr_0`, `arr_1` and so on, as in
`numpy.savez`. A single tensor is the column whose name follows a `#` in the file's
name, or the file's only column.

The examples of a TFRecord have features with the names of the elements. Features are
lists of int64, float32 or strings without a shape. They get the declared shape, in
row-major order. A file that is not on this machine is copied to the temporary folder
first. Kernels, which run many clients in one graph, get all rows of a small file as
tensors.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.files.tables as tables
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.values.plain_values as plain_values
from ray_fed.error_texts import describe_process
from ray_fed.files.arrow_files import ArrowFormat
from ray_fed.files.formats import Format
from ray_fed.files.opening import DataFile
from ray_fed.files.parquet import ParquetFormat
from ray_fed.files.tables import ArrowTable, ColumnSpec, NumpyTable, Table
from ray_fed.files.text import COMPRESSED, TextFormat
from ray_fed.language import blocks, structs, trees
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import columnar_sequence, read_limits, tensor_structures
from ray_fed.values.columnar_sequence import Column, ColumnarSequence, Dims

_ARROW: Mapping[str, Format] = {
    ".parquet": ParquetFormat(),
    ".arrow": ArrowFormat(),
    ".feather": ArrowFormat(),
    ".csv": TextFormat("csv"),
    ".json": TextFormat("json"),
    ".jsonl": TextFormat("json"),
}
_NUMPY = (".npy", ".npz")


def data(uri: object, type_spec: Any) -> fl.framework.Data:
    """Return a value that stands for a file, which is read when and where it is used.

    It can replace any value of its type, in the body of a computation and in arguments.
    For example, an argument can be a list with one file for each client. Only the name
    of the file is sent to workers.

    Args:
        uri: Path or URI of the file, as the worker sees it. The protocol is `file`,
            `memory`, or a protocol of fsspec that `Config.data.protocols` names. The
            file is a TFRecord, Parquet, Arrow, Feather, CSV, JSON lines, npz or npy
            file. A `#` and a name at the end select one column.
        type_spec: Type of the value, or anything that `to_type` converts to a type.

    Raises:
        TypeError: `uri` is not text, or no file can have values of the type.
        CompileError: The type nests deeper than protobuf writes or reads.
    """
    declared = specs.to_type(type_spec)
    _check_data_type(declared)
    if not isinstance(uri, str) or not uri.isprintable():
        raise errors.ValueMismatchError(
            f"Expected a path or a URI as text, found {structs.show(uri)}."
        )
    with blocks.depth_in_words():
        blocks.parse_type(blocks.serialize_type(declared))
    return blocks.data_block(uri, declared)


def _check_data_type(type_spec: fl.Type) -> None:
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
    """Open a file and return its content as a value of a type.

    A sequence becomes a dataset that reads rows during iteration. Tensors become NumPy
    arrays, in a Struct if the type is a struct. Raises MissingFileError,
    ValueMismatchError if the content has another type, or UnsupportedError for an
    unknown format.
    """
    file = DataFile.parse(uri)
    is_sequence = isinstance(type_spec, fl.SequenceType)
    element = type_spec.element if isinstance(type_spec, fl.SequenceType) else type_spec
    if file.suffix in SUFFIXES:
        leaves = _columns(file, element)
        return _read_records(file, leaves, element, is_sequence=is_sequence)
    table, leaves = open_table(file, element, is_sequence=is_sequence)
    if is_sequence:
        return _dataset(file, table, leaves, element)
    return _whole(file, table, leaves, element)


def _arrow_kind(file: DataFile) -> Format | None:
    if file.suffix not in COMPRESSED:
        return _ARROW.get(file.suffix)
    inner = dataclasses.replace(file, uri=file.uri[: -len(file.suffix)])
    kind = _ARROW.get(inner.suffix)
    return kind if kind is not None and kind.is_text else None


def open_table(
    file: DataFile, element: fl.Type, *, is_sequence: bool
) -> tuple[Table, dict[str, fl.TensorType]]:
    """Open a file, and return it as a table with the type of each column by name.

    `element` is the type of an element if `is_sequence`, and otherwise of the value.
    Raises UnsupportedError for an unknown format, which TFRecord is here, and
    ValueMismatchError if the columns do not have the type.
    """
    kind = _arrow_kind(file)
    if kind is None and file.suffix not in _NUMPY:
        raise errors.UnsupportedError(
            "Expected a file that ends with one of"
            f" {sorted([*_ARROW, *_NUMPY, *SUFFIXES])}, or of compressed CSV or JSON,"
            f" such as `.csv.gz`, found `{file.uri}`."
        )
    leaves = _columns(file, element)
    table = NumpyTable(file) if kind is None else ArrowTable(file, kind, leaves)
    leaves = _named(file, leaves, table.specs)
    for name, tensor_type in leaves.items():
        _check_column(file, name, tensor_type, table.specs, is_sequence=is_sequence)
    lengths = {name: (table.specs[name].shape or (None,))[0] for name in leaves}
    if is_sequence and len(set(lengths.values())) > 1:
        raise file.mismatch("one number of rows in all columns", f"{lengths}")
    return table, leaves


def _columns(file: DataFile, element: fl.Type) -> dict[str, fl.TensorType]:
    """Return the type of each tensor by its column. The name "" is the only column."""
    columns: dict[str, fl.TensorType] = {}
    for path, leaf in trees.named_leaves(element):
        if not isinstance(leaf, fl.TensorType):
            raise file.mismatch(
                "a sequence, a structure of tensors or a tensor", f"`{leaf}`"
            )
        # `numpy.savez` uses these names for arrays without a name.
        names = (f"arr_{part}" if isinstance(part, int) else part for part in path)
        columns[".".join(names) or file.column or ""] = leaf
    return columns


def _named(
    file: DataFile,
    leaves: dict[str, fl.TensorType],
    columns: Mapping[str, ColumnSpec],
) -> dict[str, fl.TensorType]:
    if "" not in leaves:
        return leaves
    if len(columns) != 1:
        raise file.mismatch(
            "one column, or the name of one after a `#`", f"the columns {list(columns)}"
        )
    return {next(iter(columns)): leaves[""]}


def _check_column(
    file: DataFile,
    name: str,
    declared: fl.TensorType,
    columns: Mapping[str, ColumnSpec],
    *,
    is_sequence: bool,
) -> None:
    if name not in columns:
        raise file.mismatch(f"a column `{name}`", f"the columns {list(columns)}")
    spec = columns[name]
    shape = spec.shape if not is_sequence else spec.shape and spec.shape[1:]
    fits = is_sequence <= bool(spec.shape) and (
        _fits_flat(declared.shape, is_sequence=is_sequence)
        if spec.is_flat
        else plain_values.fits_shape(shape, declared.shape)
    )
    if spec.dtype != tensor_structures.storage_dtype(declared) or not fits:
        of = "each row of " if is_sequence else ""
        raise file.mismatch(f"`{declared}` in {of}the column `{name}`", spec.label)


def _fits_flat(declared: Dims, *, is_sequence: bool) -> bool:
    # A list has no shape. It can be reshaped if only the first size is unknown.
    if declared is None:
        return False
    cell = declared if is_sequence else declared[1:]
    return len(cell) > 0 and None not in cell[1:] and (is_sequence or None not in cell)


def chunks_of(
    file: DataFile, table: Table, leaves: Mapping[str, fl.TensorType], rank: int
) -> Iterator[list[Any]]:
    """Yield chunks of a table: for each column, its cells in the declared shape.

    `leaves` has the types of the columns by name. They describe one cell if `rank` is
    0, and a whole column if `rank` is 1.
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
        if not plain_values.fits_shape(array.shape, leaf.shape):
            label = f"`{leaf}` as the column `{name}`"
            raise file.mismatch(label, f"the shape {list(array.shape)}")
    return trees.unflatten(iter(arrays), type_spec)


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


SUFFIXES = (".tfrecord", ".tfrecords")

_KINDS: Mapping[np.dtype[Any], str] = {
    np.dtype(np.int64): "int64_list",
    np.dtype(np.float32): "float_list",
    np.dtype(object): "bytes_list",
}
_FRAME_BYTES = 16
"""Bytes of a record besides its data: the length of the data, and two checksums."""

_STEP_BYTES = 4 * 2**20
"""Approximate bytes of the records that are read at once."""


def _read_records(
    file: DataFile,
    leaves: Mapping[str, fl.TensorType],
    element: fl.Type,
    *,
    is_sequence: bool,
) -> Any:
    # The first record is checked now, so that a wrong type raises an error early.
    first = next(_batches(file, 1), None)
    if first is None and "" in leaves:
        raise file.mismatch("an example, or the name of a feature after a `#`", "none")
    count = 1
    if first is not None:
        record = cast("bytes", first[0].numpy())
        leaves = _checked(file, record, leaves, is_sequence=is_sequence)
        count = max(1, _STEP_BYTES // (len(record) + _FRAME_BYTES))
    dataset = tf.data.Dataset.from_generator(
        lambda: _batches(file, count), output_signature=tf.TensorSpec([None], tf.string)
    ).unbatch()
    shapes = {
        name: leaf.shape if is_sequence else (leaf.shape or ())[1:]
        for name, leaf in leaves.items()
    }
    parsed = dataset.map(functools.partial(_parse, file, leaves, shapes))
    if is_sequence:
        return parsed.map(lambda *tensors: datasets.build(tensors, element))
    return _stacked(file, parsed, leaves, element)


def _batches(file: DataFile, count: int) -> Iterator[tf.Tensor]:
    # TensorFlow verifies both checksums of a record. It does not notice a file that
    # ends within the first bytes of a record, so bytes are counted here.
    num_bytes = 0
    with file.on_disk() as path:
        with tf.device("/device:CPU:0"):
            batches: Any = iter(tf.data.TFRecordDataset(path).batch(count))
        try:
            for batch in batches:
                num_bytes += sum(len(data) + _FRAME_BYTES for data in batch.numpy())
                yield batch
        except tf.errors.DataLossError as error:
            kind = "a cut short" if "truncated" in str(error) else "a damaged"
            found = f"{kind} record at byte {num_bytes}, or after"
            raise file.damaged(found) from error
        if num_bytes != pathlib.Path(path).stat().st_size:
            raise file.damaged(f"the record at byte {num_bytes} cut short")


def _checked(
    file: DataFile,
    record: bytes,
    leaves: Mapping[str, fl.TensorType],
    *,
    is_sequence: bool,
) -> Mapping[str, fl.TensorType]:
    try:
        example = tf.train.Example.FromString(record)
    except Exception as error:  # DecodeError, of whichever protobuf TensorFlow uses
        raise file.mismatch("records of tf.train.Example", "others") from error
    features = example.features.feature
    if "" in leaves:
        if len(features) != 1:
            raise file.mismatch(
                "one feature, or the name of one after a `#`",
                f"the features {sorted(features)}",
            )
        leaves = {next(iter(features)): leaves[""]}
    for name, leaf in leaves.items():
        if name not in features:
            raise file.mismatch(f"a feature `{name}`", f"features {sorted(features)}")
        kind = features[name].WhichOneof("kind")
        wanted = _KINDS.get(tensor_structures.storage_dtype(leaf))
        if wanted is None or kind not in (wanted, None):
            raise file.mismatch(f"`{leaf}` as the feature `{name}`", f"a `{kind}`")
        shape = leaf.shape if is_sequence else leaf.shape and leaf.shape[1:]
        if shape is None or None in shape[1:] or (not is_sequence and None in shape):
            raise file.mismatch(
                f"a shape whose first size alone may be unknown for `{name}`",
                f"`{leaf}`",
            )
    return leaves


def _parse(
    file: DataFile,
    leaves: Mapping[str, fl.TensorType],
    shapes: Mapping[str, Any],
    record: tf.Tensor,
) -> tuple[tf.Tensor, ...]:
    features = {
        name: tf.io.FixedLenSequenceFeature(
            [], specs.to_tf_dtype(leaf), allow_missing=True
        )
        for name, leaf in leaves.items()
    }
    parsed = tf.io.parse_single_example(record, features)
    return tuple(_laid(file, name, parsed[name], shapes[name]) for name in leaves)


def _laid(file: DataFile, name: str, values: tf.Tensor, shape: Any) -> tf.Tensor:
    sizes = [1 if size is None else size for size in shape]
    step, num_values = math.prod(sizes), tf.size(values)
    fits = (
        tf.equal(num_values % step, 0) if None in shape else tf.equal(num_values, step)
    )
    message = (
        f"Expected values of the shape {list(shape)} as the feature `{name}` of every"
        f" example in `{file.uri}`, found another number (read by"
        f" {describe_process()})."
    )
    with tf.control_dependencies([tf.debugging.Assert(fits, [message, num_values])]):
        return tf.reshape(values, [-1 if size is None else size for size in shape])


def _stacked(
    file: DataFile,
    parsed: "tf.data.Dataset[Any]",
    leaves: Mapping[str, fl.TensorType],
    type_spec: fl.Type,
) -> Any:
    examples = list(plain_values.iterate_dataset(parsed))
    arrays: list[Any] = []
    for index, (name, leaf) in enumerate(leaves.items()):
        shape = leaf.shape or ()
        if not shape or shape[0] not in (None, len(examples)):
            present = f"{len(examples)} examples"
            raise file.mismatch(f"`{leaf}` as all of the feature `{name}`", present)
        cells = [example[index].numpy() for example in examples]
        stacked = np.array(cells, tensor_structures.storage_dtype(leaf))
        arrays.append(stacked.reshape(len(examples), *shape[1:]))
    return trees.unflatten(iter(arrays), type_spec)


Keep: TypeAlias = Callable[
    [Hashable, frozenset[str], Callable[[], Any], Callable[[Any], float]], Any
]
"""Returns the cached value of a key, or makes and caches it: `ClientStore.keep`."""

FILE_BYTES = 32 * 2**20
"""Maximum bytes of the rows of a file that is in memory as a whole. The rows of a
larger file are read during iteration."""

SMALL_BYTES = 128 * 2**20
"""Maximum bytes of the rows of all files of the clients that one graph runs."""


def read_if_small(
    uri: str, type_spec: fl.SequenceType
) -> "ColumnarSequence | tf.data.Dataset[Any]":
    """Open a file and return its rows, or a dataset if it is large or a TFRecord."""
    file = DataFile.parse(uri)
    if file.suffix in SUFFIXES:
        return read(uri, type_spec)
    table, leaves = open_table(file, type_spec.element, is_sequence=True)
    if table.count_bytes(list(leaves)) > FILE_BYTES:
        return read(uri, type_spec)
    parts: list[list[Column]] = [[_column([], leaf)] for leaf in leaves.values()]
    num_bytes = 0
    for chunk in chunks_of(file, table, leaves, rank=0):
        read_limits.check()
        for part, cells, leaf in zip(parts, chunk, leaves.values(), strict=True):
            part.append(_column(cells, leaf))
            num_bytes += part[-1].num_bytes
        if num_bytes > FILE_BYTES:
            return read(uri, type_spec)
    columns = tuple(columnar_sequence.join_columns(part) for part in parts)
    return ColumnarSequence(columns, columns[0].length)


def read_cached(
    uri: str, type_spec: fl.SequenceType, keep: Keep
) -> "ColumnarSequence | tf.data.Dataset[Any]":
    """Return the result of `read_if_small`, cached by `keep` until the file changes."""
    stamp = DataFile.parse(uri).stamp()
    if stamp is None:
        return read_if_small(uri, type_spec)
    key = (uri, type_spec, stamp)
    return keep(key, frozenset(), lambda: read_if_small(uri, type_spec), _count_bytes)


def _count_bytes(rows: Any) -> float:
    is_held = isinstance(rows, ColumnarSequence)
    return rows.num_bytes if is_held else math.inf  # a dataset holds nothing


def _column(cells: Any, leaf: fl.TensorType) -> Column:
    return columnar_sequence.lay_column(
        cells, tensor_structures.storage_dtype(leaf), leaf.shape
    )


class FileSequence(datasets.KnownSequence):
    """The rows of a file as a sequence. Each pass over it reads the file again."""

    def __init__(self, uri: str, type_spec: fl.SequenceType) -> None:
        dataset = read(uri, type_spec)
        super().__init__(type_spec.element, lambda: dataset)
        self._uri, self._type_spec = uri, type_spec

    def load(self) -> "datasets.HeldSequence | tf.data.Dataset[Any]":
        """Read the rows into memory, or return a dataset if they are too large."""
        rows = read_if_small(self._uri, self._type_spec)
        if isinstance(rows, ColumnarSequence):
            return datasets.HeldSequence(rows, self.element)
        return rows


def to_features(features: Mapping[str, Any]) -> dict[str, fl.TensorType]:
    """Return the types of the features of a `tf.train.Example`, by name.

    `features` has anything that `to_type` converts. Raises ValueMismatchError for a
    dtype besides int64, float32 and strings, and if another size than the first is
    unknown.
    """
    types: dict[str, fl.TensorType] = {}
    for name, declared in features.items():
        tensor = specs.to_type(declared)
        fits = (
            isinstance(tensor, fl.TensorType)
            and tensor_structures.storage_dtype(tensor) in _KINDS
            and tensor.shape is not None
            and None not in tensor.shape[1:]
        )
        if not fits:
            raise errors.ValueMismatchError(
                "Expected int64, float32 or strings, in a shape whose first size alone"
                f" may be unknown, as the feature `{name}`, found `{tensor}`: convert"
                " it by `map`."
            )
        types[name] = tensor  # pyright: ignore[reportArgumentType]
    return types


def parse_examples(
    serialized: Sequence[bytes], features: Mapping[str, fl.TensorType], label: str
) -> ColumnarSequence:
    """Parse serialized `tf.train.Example`s to a sequence with one element for each.

    The columns are in the order of `features`. `label` names the examples in errors.
    Raises ValueMismatchError if an example does not have the features.
    """
    wanted = {name: _feature(name, tensor) for name, tensor in features.items()}
    try:
        with tf.device("/device:CPU:0"):
            parsed: Any = tf.io.parse_example(
                tf.constant(list(serialized), tf.string, [len(serialized)]), wanted
            )
            columns = [
                _parsed_column(parsed[name], features[name]) for name in features
            ]
    except (tf.errors.InvalidArgumentError, tf.errors.DataLossError) as error:
        raise _mismatch(features, label, str(error.message)) from error
    except UnicodeDecodeError as error:  # TensorFlow's message quotes the bytes
        raise _mismatch(features, label, "bytes that are no example") from error
    return ColumnarSequence(tuple(columns), len(serialized))


def _mismatch(
    features: Mapping[str, fl.TensorType], label: str, reason: str
) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected examples with the features {list(features)} in {label}, found"
        f" otherwise ({reason})."
    )


def _feature(name: str, tensor: fl.TensorType) -> Any:
    dtype = specs.to_tf_dtype(tensor)
    shape = list(tensor.shape or ())
    if None not in shape:
        return tf.io.FixedLenFeature(shape, dtype)
    inside = tuple(
        tf.io.RaggedFeature.UniformRowLength(size or 0) for size in shape[1:]
    )
    return tf.io.RaggedFeature(
        dtype, value_key=name, partitions=inside, row_splits_dtype=tf.int64
    )


def _parsed_column(parsed: Any, tensor: fl.TensorType) -> Column:
    if not isinstance(parsed, tf.RaggedTensor):
        return Column(parsed.numpy())
    values: Any = parsed.values
    splits = parsed.row_splits.numpy()
    shape = [size or 0 for size in (tensor.shape or ())[1:]]
    while isinstance(values, tf.RaggedTensor):
        values = values.values
    return Column(values.numpy().reshape(-1, *shape), splits)
