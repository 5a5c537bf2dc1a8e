"""Files that are larger than what may be in memory at once: rows come as they go."""

# pyright: reportUnknownLambdaType=false

import contextlib
import io
import pathlib
import resource
import zipfile
from collections.abc import Callable, Generator
from typing import Any

import federated_language as fl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.program import ClientData
from ray_fed.tensorflow import external_data

WIDTH = 2**13
"""Values of a row, of 32 KiB: the usual batch of 4,096 rows has 128 MiB."""

NUM_ROWS = external_data.FILE_BYTES // (4 * WIDTH) + 32
BOUND_BYTES = 64 * 2**20
"""What reading may take: half of the file, a quarter of what a copy beside it takes."""


def _rows(order: Any = "C") -> Any:
    rows = np.zeros((NUM_ROWS, WIDTH), np.float32, order)
    rows[:, 0] = np.arange(NUM_ROWS)
    return rows


def _write_zip(path: pathlib.Path, rows: Any) -> None:
    stored = io.BytesIO()
    np.save(stored, rows)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x.npy", stored.getbuffer())


def _to_table(rows: Any) -> Any:
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), WIDTH)
    return pa.table({"x": column, "who": np.arange(NUM_ROWS) % 7})


def _write_arrow(path: pathlib.Path, rows: Any) -> None:
    table = _to_table(rows)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, 64)


def _write_records(path: pathlib.Path, rows: Any) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            values = tf.train.Feature(
                bytes_list=tf.train.BytesList(value=[row.tobytes()])
            )
            features = tf.train.Features(feature={"x": values})
            writer.write(tf.train.Example(features=features).SerializeToString())


FORMATS: dict[str, tuple[str, Callable[[pathlib.Path], object]]] = {
    "npy": (".npy", lambda path: np.save(path, _rows())),
    "npy by columns": (".npy", lambda path: np.save(path, _rows("F"))),
    "npz": (".npz", lambda path: np.savez(path, x=_rows())),
    "npz, compressed": (".npz", lambda path: _write_zip(path, _rows())),
    "npz by columns": (".npz", lambda path: np.savez(path, x=_rows("F"))),
    "parquet": (
        ".parquet",
        lambda path: pq.write_table(
            _to_table(_rows()), path, use_dictionary=False, compression="none"
        ),
    ),
    "parquet of zeros": (
        ".parquet",
        lambda path: pq.write_table(_to_table(_rows()), path),
    ),
    "arrow": (".arrow", lambda path: _write_arrow(path, _rows())),
    "TFRecord": (".tfrecord", lambda path: _write_records(path, _rows())),
}


def _resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


_DEFAULT_POOL = pa.default_memory_pool()
_POOL = pa.proxy_memory_pool(_DEFAULT_POOL)
"""Counts what arrow allocates; lives as long as whatever may be in it."""


@contextlib.contextmanager
def counted() -> Generator[None]:
    pa.set_memory_pool(_POOL)
    try:
        yield
    finally:
        pa.set_memory_pool(_DEFAULT_POOL)


SECOND_FORMS = {
    "TFRecord",  # which never was read whole
    "npy by columns",
    "npz, compressed",
    "npz by columns",
    "parquet of zeros",
    "arrow",
    "parquet",
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind in SECOND_FORMS))
        for kind in FORMATS
    ],
)
def test_memory_follows_what_is_read_at_once(tmp_path: pathlib.Path, kind: str) -> None:
    suffix, write = FORMATS[kind]
    path = tmp_path / f"rows{suffix}"
    write(path)
    is_packed = suffix == ".tfrecord"
    row = fl.TensorType(np.str_) if is_packed else fl.TensorType(np.float32, [WIDTH])
    # What arrow frees goes back to the system when its allocator sees fit.
    is_arrow = suffix in {".arrow", ".parquet"}
    count_bytes = _POOL.bytes_allocated if is_arrow else _resident_bytes
    before = peak = count_bytes()

    firsts: list[float] = []
    with counted():
        rows: Any = external_data.read_if_small(
            str(path) if suffix == ".npy" else f"{path}#x", fl.SequenceType(row)
        )
        for element in rows.as_numpy_iterator():
            peak = max(peak, count_bytes())
            firsts.append(np.frombuffer(element, np.float32, 1).item())

    assert firsts == list(range(NUM_ROWS))
    assert peak - before < BOUND_BYTES
    if is_arrow:
        assert peak > before


@pytest.mark.parametrize("copy_bytes", [0, 2**30], ids=["from files", "sorted"])
def test_a_table_of_wide_rows_is_read_in_pieces(
    tmp_path: pathlib.Path, copy_bytes: int
) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(_to_table(_rows()), path)

    with counted():
        data = ClientData.from_parquet(path, client="who", x="x", copy_bytes=copy_bytes)
        (rows,) = data[3].read().columns

    np.testing.assert_array_equal(rows.rows[:, 0], np.arange(3, NUM_ROWS, 7))
    assert 0 < (_POOL.max_memory() or 0) < 2.5 * BOUND_BYTES


def test_columns_of_different_lengths_are_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.zeros(3, np.float32), y=np.zeros(2, np.float32))
    pair = fl.StructType([("x", np.float32), ("y", np.float32)])

    for read in (external_data.read, external_data.read_if_small):
        with pytest.raises(errors.ValueMismatchError, match=r"'x': 3, 'y': 2"):
            read(str(path), fl.SequenceType(pair))
