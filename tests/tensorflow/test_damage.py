"""Damaged files: an error, or, where the format has no checksum, another value."""

import collections
import io
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import federated_language as fl
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf

import ray_fed.tensorflow.tensors.datasets as datasets
from ray_fed import errors
from ray_fed.tensorflow import external_data

LABEL = np.arange(40, dtype=np.int64) * 257
ROWS = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
ELEMENT = fl.StructType([("label", np.int64), ("x", fl.TensorType(np.float32, (3,)))])
EXAMPLE_BYTES = 16  # of a record, beside its data


def _write_records(_: Any) -> bytes:
    path = pathlib.Path(f"{os.getpid()}.tfrecord")
    with tf.io.TFRecordWriter(str(path)) as writer:
        for label, row in zip(LABEL, ROWS, strict=True):
            features = {
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                "x": tf.train.Feature(float_list=tf.train.FloatList(value=row)),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    return path.read_bytes()


def _table() -> Any:
    return pa.table({"label": LABEL, "x": list(ROWS)})


def _write_npz(file: Any) -> None:
    np.savez_compressed(file, label=LABEL, x=ROWS)


def _write_npy(file: Any) -> None:
    np.save(file, LABEL)


def _write_arrow(file: Any) -> None:
    table = _table()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=16)


def _write_parquet(file: Any) -> None:
    pyarrow.parquet.write_table(_table(), file, write_page_checksum=True)


WRITERS: Mapping[str, Callable[[Any], Any]] = {
    "tfrecord": _write_records,
    "npz": _write_npz,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
    "npy": _write_npy,
}
FORMATS = pytest.mark.parametrize("suffix", WRITERS)
SCHEMES = pytest.mark.parametrize("scheme", ["", "memory://"])
CHECKED = ("tfrecord", "npz")
"""Formats with a checksum of all that decides a value."""


@pytest.fixture
def content(
    suffix: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> bytes:
    """A file of a format, whole."""
    monkeypatch.chdir(tmp_path)
    written = io.BytesIO()
    return WRITERS[suffix](written) or written.getvalue()


@pytest.fixture
def read(suffix: str, tmp_path: pathlib.Path) -> Callable[..., Any]:
    """Reads content from a file of a format at a path of a scheme, as rows."""

    def read(content: bytes, scheme: str = "") -> list[tuple[Any, ...]]:
        uri = f"{scheme}{tmp_path}/data.{suffix}"
        with fsspec.open(uri, "wb") as file:
            cast("Any", file).write(content)
        element = fl.TensorType(np.int64) if suffix == "npy" else ELEMENT
        dataset = external_data.read(uri, fl.SequenceType(element))
        return [
            tuple(np.asarray(part) for part in _parts(member))
            for member in datasets.to_elements(dataset, element)
        ]

    return read


def _parts(member: Any) -> list[Any]:
    return [member] if isinstance(member, np.integer) else list(member)


def _is_whole(suffix: str, rows: list[tuple[Any, ...]]) -> bool:
    expected = [(LABEL,) if suffix == "npy" else (LABEL, ROWS)][0]
    return len(rows) == len(LABEL) and all(
        np.array_equal(np.stack([row[index] for row in rows]), column)
        for index, column in enumerate(expected)
    )


def _flips(content: bytes, step: int) -> Iterator[bytes]:
    """Yield the content with one bit changed, of one byte in so many."""
    for position in range(0, len(content), step):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        yield bytes(changed)


@FORMATS
@SCHEMES
def test_whole_file_has_what_was_written(
    content: bytes, read: Callable[..., Any], suffix: str, scheme: str
) -> None:
    assert _is_whole(suffix, read(content, scheme))


@SCHEMES
@pytest.mark.parametrize("suffix", ["tfrecord"])
@pytest.mark.parametrize(
    "place", [0, 9, 20, -1], ids=["length", "its checksum", "data", "data's checksum"]
)
def test_every_part_of_a_record_is_verified(
    content: bytes,
    read: Callable[..., Any],
    scheme: str,
    place: int,
) -> None:
    *_, start, end = _record_ends(content)
    position = start + place if place >= 0 else end + place
    changed = bytearray(content)
    changed[position] ^= 4

    with pytest.raises(
        (errors.ValueMismatchError, tf.errors.InvalidArgumentError)
    ) as caught:
        read(bytes(changed), scheme)

    assert "data.tfrecord` as it was written, found a damaged record" in str(
        caught.value
    )


def _record_ends(content: bytes) -> list[int]:
    ends = [0]
    while ends[-1] < len(content):
        length = int.from_bytes(content[ends[-1] : ends[-1] + 8], "little")
        ends.append(ends[-1] + length + EXAMPLE_BYTES)
    return ends[1:]


@SCHEMES
@pytest.mark.parametrize("suffix", ["tfrecord"])
@pytest.mark.parametrize("missing", [3, 4, 5, 50])
def test_short_records_are_refused(
    content: bytes, read: Callable[..., Any], scheme: str, missing: int
) -> None:
    with pytest.raises(Exception, match=r"data\.tfrecord` as it was written, found"):
        read(content[:-missing], scheme)


def test_length_that_is_damaged_takes_no_memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = bytearray(_write_records(None))
    content[6] = 1  # 2**48 bytes
    pathlib.Path("x.tfrecord").write_bytes(content + bytes(8 * 2**20))

    with pytest.raises(errors.ValueMismatchError, match="a damaged record at byte 0"):
        external_data.read("x.tfrecord", fl.SequenceType(ELEMENT))


def _outcomes(
    contents: Iterator[bytes], read: Callable[..., Any], suffix: str
) -> collections.Counter[str]:
    """Count what reading gives; anything else than a value or a clear error raises."""
    counts: collections.Counter[str] = collections.Counter()
    for content in contents:
        try:
            counts["same" if _is_whole(suffix, read(content)) else "other"] += 1
        except (errors.UserError, tf.errors.OpError) as error:
            is_named = f"data.{suffix}" in str(error)
            counts["error" if is_named else "error without a name"] += 1
    return counts


STEP = 307
"""Bytes from one damaged place to the next."""


@FORMATS
def test_changed_bit_is_an_error_or_cannot_be_told(
    content: bytes, read: Callable[..., Any], suffix: str
) -> None:
    counts = _outcomes(_flips(content, STEP), read, suffix)

    assert counts.total() == -(-len(content) // STEP)
    assert not counts["error without a name"]
    assert counts["error"]
    assert not (suffix in CHECKED and counts["other"])
    assert not (suffix == "tfrecord" and counts["same"])


@FORMATS
def test_short_file_is_an_error(
    content: bytes, read: Callable[..., Any], suffix: str
) -> None:
    whole = {0, *_record_ends(content)} if suffix == "tfrecord" else set[int]()
    lengths = [n for n in range(0, len(content), STEP) if n not in whole]

    counts = _outcomes((content[:n] for n in lengths), read, suffix)

    assert counts == {"error": len(lengths)}
