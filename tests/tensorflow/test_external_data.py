"""External data: files of every format, read as the declared type says."""

import asyncio
import collections
import importlib
import os
import pathlib
import platform
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, cast

import federated_language as fl
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.files.tables as tables
from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.language import blocks
from ray_fed.values import stored as stored_
from tests.executor_calls import computed, embed

Write = Callable[[str, Mapping[str, Any]], None]

POINTS = {
    "label": np.array([3, 1, 2], np.int64),
    "x": np.array([[1, 2], [3, 4], [5, 6]], np.float32),
    "word": np.array([b"a", b"", "ü".encode()], object),
}
POINT = fl.StructType(
    [("x", fl.TensorType(np.float32, (2,))), ("word", np.str_), ("label", np.int64)]
)
POINT_ROWS = [
    collections.OrderedDict(x=x, word=word, label=label)
    for x, word, label in zip(POINTS["x"], POINTS["word"], POINTS["label"], strict=True)
]


def _open(uri: str) -> Any:
    return fsspec.open(uri, "wb")


def _to_table(arrays: Mapping[str, Any]) -> Any:
    return pa.table({name: list(array) for name, array in arrays.items()})


def _write_npz(uri: str, arrays: Mapping[str, Any]) -> None:
    stored = {
        name: np.array([item.decode() for item in array])
        if array.dtype == object
        else array
        for name, array in arrays.items()
    }
    with _open(uri) as file:
        np.savez_compressed(file, **cast("Any", stored))


def _write_parquet(uri: str, arrays: Mapping[str, Any]) -> None:
    with _open(uri) as file:
        pyarrow.parquet.write_table(_to_table(arrays), file)


def _write_arrow(uri: str, arrays: Mapping[str, Any]) -> None:
    table = _to_table(arrays)
    with _open(uri) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def _example(row: Mapping[str, Any]) -> bytes:
    features = tf.train.Features(
        feature={name: _feature(value) for name, value in row.items()}
    )
    return tf.train.Example(features=features).SerializeToString()


def _feature(value: Any) -> Any:
    match np.asarray(value).dtype.kind:
        case "i":
            return tf.train.Feature(
                int64_list=tf.train.Int64List(value=np.ravel(value))
            )
        case "f":
            return tf.train.Feature(
                float_list=tf.train.FloatList(value=np.ravel(value))
            )
        case _:
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def _write_records(uri: str, arrays: Mapping[str, Any]) -> None:
    path = f"{os.getpid()}.tfrecord" if "://" in uri else uri
    target = pathlib.Path(path)
    with tf.io.TFRecordWriter(path) as writer:
        for cells in zip(*arrays.values(), strict=True):
            row = dict(zip(arrays, cells, strict=True))
            writer.write(_example(row))
    if path != uri:
        with _open(uri) as file:
            file.write(target.read_bytes())
        target.unlink()


WRITERS: Mapping[str, Write] = {
    "npz": _write_npz,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
    "feather": _write_arrow,
    "tfrecord": _write_records,
}
FORMATS = pytest.mark.parametrize("suffix", [s for s in WRITERS if s != "feather"])
"""Those that are read in a way of their own: feather is arrow."""


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Callable[..., str]:
    """Writes columns to a file of a format; returns its path."""

    def write(suffix: str, arrays: Mapping[str, Any]) -> str:
        path = str(tmp_path / f"data.{suffix}")
        WRITERS[suffix](path, arrays)
        return path

    return write


def _read(value: Any, type_spec: Any = None) -> Any:
    return computed(embed(EagerTFExecutor(), value, type_spec))


def _compute(uri: str, type_spec: Any) -> Any:
    block = rtf.data(uri, type_spec)
    return fl.framework.type_to_py_container(_read(block), block.type_signature)


@pytest.mark.parametrize("suffix", WRITERS)
def test_sequence_has_one_element_a_row(write: Callable[..., str], suffix: str) -> None:
    path = write(suffix, POINTS)

    elements = _compute(path, fl.SequenceType(POINT))

    assert len(elements) == 3
    for element, expected in zip(elements, POINT_ROWS, strict=True):
        assert list(element) == ["x", "word", "label"]
        assert element["x"].dtype == np.float32
        assert element["label"].dtype == np.int64
        np.testing.assert_array_equal(element["x"], expected["x"])
        assert element["word"] == expected["word"]
        assert element["label"] == expected["label"]


@FORMATS
def test_structure_has_whole_columns(write: Callable[..., str], suffix: str) -> None:
    path = write(suffix, POINTS)
    type_spec = fl.StructType(
        [
            ("label", fl.TensorType(np.int64, (3,))),
            ("x", fl.TensorType(np.float32, (None, 2))),
        ]
    )

    found = _compute(path, type_spec)

    np.testing.assert_array_equal(found["label"], POINTS["label"])
    np.testing.assert_array_equal(found["x"], POINTS["x"])


@FORMATS
def test_fragment_selects_a_column(write: Callable[..., str], suffix: str) -> None:
    path = write(suffix, POINTS)

    found = _compute(f"{path}#word", fl.TensorType(np.str_, (None,)))

    assert found.tolist() == POINTS["word"].tolist()


@FORMATS
def test_only_column_needs_no_name(write: Callable[..., str], suffix: str) -> None:
    path = write(suffix, {"label": POINTS["label"]})

    assert _compute(path, fl.SequenceType(np.int64)) == [3, 1, 2]


@FORMATS
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_uri_names_any_filesystem(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    scheme: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = f"{scheme}://{tmp_path}/data.{suffix}"
    WRITERS[suffix](uri.removeprefix("file://"), POINTS)

    found = _compute(uri, fl.SequenceType(POINT))

    assert [element["label"] for element in found] == [3, 1, 2]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "tfrecord"])
def test_lists_of_any_length_are_vectors(
    write: Callable[..., str], suffix: str
) -> None:
    cells = np.empty(3, object)
    cells[:] = [np.arange(n, dtype=np.int64) for n in (2, 0, 3)]
    path = write(suffix, {"x": cells})

    found = _compute(path, fl.SequenceType(fl.TensorType(np.int64, (None,))))

    assert [element.tolist() for element in found] == [[0, 1], [], [0, 1, 2]]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "tfrecord"])
def test_lists_are_laid_in_the_declared_shape(
    write: Callable[..., str], suffix: str
) -> None:
    path = write(suffix, {"x": np.arange(8, dtype=np.float32).reshape(2, 4)})

    found = _compute(path, fl.SequenceType(fl.TensorType(np.float32, (2, 2))))

    np.testing.assert_array_equal(found, np.arange(8).reshape(2, 2, 2))


def test_nested_structures_are_columns_with_dots(write: Callable[..., str]) -> None:
    rows = [{"a": {"b": 1, "c": 2.0}}, {"a": {"b": 3, "c": 4.0}}]
    path = write("parquet", {"outer": np.array(rows, object)})
    element = fl.StructType(
        [("outer", fl.StructType([("a", fl.StructType([("b", np.int64)]))]))]
    )

    found = _compute(path, fl.SequenceType(element))

    assert [element["outer"]["a"]["b"] for element in found] == [1, 3]


def test_many_rows_come_in_chunks(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "CHUNK_BYTES", 80)
    monkeypatch.setattr(tables, "_WHOLE_BYTES", 80)
    path = write("parquet", {"x": np.arange(105, dtype=np.int64)})

    assert _compute(path, fl.SequenceType(np.int64)) == list(range(105))
    whole = _compute(path, fl.TensorType(np.int64, (105,)))
    np.testing.assert_array_equal(whole, np.arange(105))


@FORMATS
def test_file_of_no_rows_is_an_empty_sequence(
    write: Callable[..., str], suffix: str
) -> None:
    table = pa.table({"x": pa.array([], pa.int64())})
    if suffix in ("parquet", "arrow", "feather"):
        path = write(suffix, POINTS)
        with open(path, "wb") as file:  # noqa: PTH123 (pyarrow wants the file)
            if suffix == "parquet":
                pyarrow.parquet.write_table(table, file)
            else:
                pa.ipc.new_file(file, table.schema).close()
    else:
        path = write(suffix, {"x": np.array([], np.int64)})

    assert _compute(f"{path}#x", fl.SequenceType(np.int64)) == []
    assert _compute(f"{path}#x", fl.TensorType(np.int64, (None,))).shape == (0,)


def test_sequence_is_read_when_iterated_and_anew(write: Callable[..., str]) -> None:
    path = write("parquet", {"x": np.arange(3, dtype=np.int64)})
    block = rtf.data(path, fl.SequenceType(np.int64))

    async def embed() -> Any:
        executor = EagerTFExecutor()
        embedded = await executor.create_value(block)
        write("parquet", {"x": np.arange(5, dtype=np.int64)})
        return await embedded.compute(), await embedded.compute()

    first, second = asyncio.run(embed())

    assert first == second == list(range(5))


@FORMATS
def test_missing_file_is_named_with_the_executor(suffix: str) -> None:
    block = rtf.data(f"/no/such/file.{suffix}", fl.SequenceType(np.int64))

    with pytest.raises(errors.MissingFileError) as caught:
        _read(block)

    assert f"`/no/such/file.{suffix}`" in str(caught.value)
    assert f"process {os.getpid()} on node `{platform.node()}`" in str(caught.value)


def _put_fifo(path: pathlib.Path) -> None:
    os.mkfifo(path)


def _put_device(path: pathlib.Path) -> None:
    path.symlink_to("/dev/zero")


def _put_loop(path: pathlib.Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("suffix", "put", "found"),
    [
        ("npz", _put_fifo, "a FIFO"),
        ("parquet", _put_fifo, "a FIFO"),
        ("arrow", _put_fifo, "a FIFO"),
        ("tfrecord", _put_fifo, "a FIFO"),
        ("npz", _put_device, "a device"),
        ("npz", _put_loop, "symbolic links"),
        ("npz", pathlib.Path.mkdir, "a folder"),
    ],
)
def test_only_regular_files_are_opened(
    tmp_path: pathlib.Path,
    suffix: str,
    put: Callable[[pathlib.Path], None],
    found: str,
) -> None:
    path = tmp_path / f"data.{suffix}"
    put(path)

    with pytest.raises(errors.MissingFileError, match=rf"data\.{suffix}.*{found}"):
        _compute(str(path), fl.SequenceType(np.int64))


def _npy(header: str, content: bytes = b"") -> bytes:
    return (
        b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header.encode() + content
    )


def _header(shape: str, descr: str = "<i8") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n"


@pytest.mark.parametrize("suffix", ["npy", "npz"])
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(_npy(_header(f"({10**25},)")), id="10**25 elements"),
        pytest.param(_npy(_header(f"({10**11},)")), id="10**11 elements"),
        pytest.param(_npy(_header("(1,)"), bytes(16)), id="more bytes than elements"),
        pytest.param(_npy(_header("(3,)"), bytes(16)), id="fewer bytes than elements"),
        pytest.param(_npy("{'descr': '<i8', 'shape': (3,"), id="unclosed header"),
        pytest.param(_npy("-" * 9000 + "1"), id="many signs in a header"),
        pytest.param(_npy(_header("(1,)", "<U1"), b"\0\xd8\0\0"), id="lone surrogate"),
    ],
)
def test_array_that_is_not_what_its_header_claims_is_named(
    tmp_path: pathlib.Path, suffix: str, content: bytes
) -> None:
    path = tmp_path / f"data.{suffix}"
    if suffix == "npy":
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("array.npy", content)
    dtype = np.str_ if b"U1" in content else np.int64

    with pytest.raises(errors.ValueMismatchError, match=rf"data\.{suffix}"):
        _compute(str(path), fl.TensorType(dtype, (None,)))


@FORMATS
@pytest.mark.parametrize(
    ("column", "type_spec", "found"),
    [
        pytest.param("label", fl.SequenceType(np.int32), "", id="other dtype"),
        pytest.param("label", fl.SequenceType(np.str_), "", id="no string"),
        pytest.param("y", fl.SequenceType(np.int64), "label", id="no such column"),
        pytest.param(
            "x", fl.SequenceType(fl.TensorType(np.float32, (3,))), "", id="other shape"
        ),
        pytest.param("", fl.SequenceType(np.int64), "word", id="many columns"),
        pytest.param(
            "", fl.SequenceType(fl.StructType([np.int64])), "label", id="no names"
        ),
        pytest.param(
            "label", fl.TensorType(np.int64, (4,)), "3", id="other number of rows"
        ),
    ],
)
def test_mismatch_names_the_file_and_the_executor(
    write: Callable[..., str], suffix: str, column: str, type_spec: Any, found: str
) -> None:
    path = write(suffix, POINTS)
    block = rtf.data(f"{path}#{column}" if column else path, type_spec)

    with pytest.raises((errors.ValueMismatchError, tf.errors.OpError)) as caught:
        _read(block)

    assert path in str(caught.value)
    assert f"process {os.getpid()}" in str(caught.value)
    assert found in str(caught.value)


def test_an_npz_file_of_unknown_compression_is_named(write: Callable[..., str]) -> None:
    path = pathlib.Path(write("npz", POINTS))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 10] = 99
    path.write_bytes(content)

    with pytest.raises(errors.ValueMismatchError, match=r"data\.npz.*NotImplemented"):
        _compute(str(path), POINT)


@pytest.mark.parametrize("suffix", ["npz", "parquet", "arrow"])
def test_file_of_another_format_is_refused(
    write: Callable[..., str], tmp_path: pathlib.Path, suffix: str
) -> None:
    path = tmp_path / f"other.{suffix}"
    path.write_bytes(b"neither this nor that, and not short")

    with pytest.raises(errors.ValueMismatchError, match=f"other.{suffix}"):
        _compute(str(path), fl.SequenceType(np.int64))


def test_nulls_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "nulls.parquet"
    pyarrow.parquet.write_table(pa.table({"x": [1, None]}), path)

    with pytest.raises(errors.ValueMismatchError, match=r"nulls\.parquet.*nulls"):
        _compute(str(path), fl.TensorType(np.int64, (None,)))


def test_categories_are_their_values(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "words.parquet"
    words = pa.DictionaryArray.from_arrays(pa.array([2, 0]), pa.array(["a", "b", "c"]))
    pyarrow.parquet.write_table(pa.table({"x": words, "v": ["d", "e"]}), path)

    found = _compute(f"{path}#x", fl.TensorType(np.str_, (None,)))

    assert found.tolist() == [b"c", b"a"]


TEXT = {
    "csv": "label,word,x\n3,a,1.5\n1,,2\n",
    "jsonl": '{"label": 3, "word": "a", "x": 1.5}\n{"label": 1, "word": "", "x": 2}\n',
}


@pytest.mark.parametrize("suffix", TEXT)
def test_text_is_read_as_the_declared_types(
    tmp_path: pathlib.Path, suffix: str
) -> None:
    path = tmp_path / f"data.{suffix}"
    path.write_text(TEXT[suffix])
    element = fl.StructType([("x", np.float32), ("label", np.int8), ("word", np.str_)])

    rows = _compute(str(path), fl.SequenceType(element))
    whole = _compute(f"{path}#label", fl.TensorType(np.int64, (None,)))

    assert [tuple(row.values()) for row in rows] == [(1.5, 3, b"a"), (2.0, 1, b"")]
    assert rows[0]["x"].dtype == np.float32
    assert whole.tolist() == [3, 1]
    with pytest.raises(errors.ValueMismatchError, match=rf"data\.{suffix}"):
        _compute(f"{path}#word", fl.TensorType(np.int64, (None,)))


def test_lists_of_json_are_vectors(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('{"x": [1, 2]}\n{"x": []}\n')

    found = _compute(str(path), fl.SequenceType(fl.TensorType(np.float32, (None,))))

    assert [element.tolist() for element in found] == [[1.0, 2.0], []]


def test_unknown_suffix_lists_those_that_are_read() -> None:
    with pytest.raises(errors.UnsupportedError, match=r"\.npz.*\.tfrecord.*data\.xls"):
        _compute("data.xls", fl.SequenceType(np.int64))


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(errors.UnsupportedError, match=r"nosuch://a/data\.npz"):
        _compute("nosuch://a/data.npz", fl.SequenceType(np.int64))


def test_other_content_is_refused() -> None:
    block = blocks.data_block("a.npz", fl.TensorType(np.int64))
    block.content.type_url = "type.googleapis.com/google.protobuf.Duration"

    with pytest.raises(errors.UnsupportedError, match=r"StringValue.*Duration"):
        _read(block)


def test_data_of_another_type_than_declared_is_refused() -> None:
    block = rtf.data("a.npz", fl.SequenceType(np.int64))

    with pytest.raises(errors.ValueMismatchError, match=r"int32\*"):
        _read(block, fl.SequenceType(np.int32))


def test_data_is_read_inside_of_a_structure(write: Callable[..., str]) -> None:
    path = write("npz", POINTS)
    type_spec = fl.StructType([("n", np.int32), ("data", fl.SequenceType(np.int64))])
    value = {"n": 7, "data": rtf.data(f"{path}#label", type_spec["data"])}

    found = _read(value, type_spec)

    assert found.n == 7
    assert found.data == [3, 1, 2]


def test_plain_reference_reads_as_the_block_does(write: Callable[..., str]) -> None:
    path = write("npz", POINTS)
    external = stored_.External(f"{path}#label")

    assert _read(external, fl.SequenceType(np.int64)) == [3, 1, 2]


@pytest.mark.slow
def test_importing_the_front_end_loads_no_extra() -> None:
    code = "import sys, ray_fed.tensorflow; print('fsspec' in sys.modules)"
    found = importlib.import_module("subprocess").run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert found.stdout.split() == ["False"]
