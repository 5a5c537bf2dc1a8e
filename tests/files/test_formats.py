"""Formats yield all rows in batches of bounded size, read in bounded steps."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
from typing_extensions import override

from ray_fed.files.arrow_files import ArrowFormat
from ray_fed.files.formats import Format, Wanted
from ray_fed.files.parquet import ParquetFormat
from ray_fed.files.text import TextFormat

NUM_ROWS = 20_000
PIECE_BYTES = 2**16
STEP_BYTES = 2**20


def make_table() -> Any:
    rng = np.random.default_rng(0)
    rows = range(NUM_ROWS)
    lists = pa.list_(pa.int32())
    wide = pa.array(rng.random(NUM_ROWS * 50, dtype=np.float32))
    return pa.table(
        {
            "number": rng.random(NUM_ROWS),
            "zero": np.zeros(NUM_ROWS),
            "text": [f"text {row % 977}" for row in rows],
            "list": pa.array([[*range(r % 5)] if r % 7 else None for r in rows], lists),
            "wide": pa.FixedSizeListArray.from_arrays(wide, 50),
            "kind": pa.array([f"k{row % 9}" for row in rows]).dictionary_encode(),
            "flag": [row % 3 == 0 for row in rows],
            "null": pa.nulls(NUM_ROWS),
        }
    )


class Counted(io.BytesIO):
    """A file that notes how many bytes each read asks for."""

    largest = 0

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.largest = max(self.largest, len(content))
        return content


def write(table: Any, compression: str | None, chunk: int) -> bytes:
    sink = io.BytesIO()
    options = ipc.IpcWriteOptions(compression=compression)
    with ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return sink.getvalue()


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("chunk", [NUM_ROWS, 7000, 50])
def test_pieces_have_all_rows_and_bounded_bytes(
    compression: str | None, chunk: int
) -> None:
    table = make_table()
    content = write(table, compression, chunk)

    for columns in (table.column_names, ["text", "number"], ["null"], ["kind"]):
        file = Counted(content)
        pieces = list(ArrowFormat().batches(file, Wanted(columns, PIECE_BYTES)))

        assert pa.Table.from_batches(pieces).equals(table.select(columns))
        assert max(piece.nbytes for piece in pieces) <= 1.5 * PIECE_BYTES
        assert file.largest <= STEP_BYTES


def test_batch_without_buffers_is_copied() -> None:
    table = pa.table({"null": pa.nulls(5)})
    content = write(table, "lz4", NUM_ROWS)

    pieces = list(ArrowFormat().batches(io.BytesIO(content), Wanted(["null"], -1)))

    assert [piece.num_rows for piece in pieces] == [1] * 5


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_damage_is_an_error_of_arrow(compression: str | None) -> None:
    content = write(make_table(), compression, NUM_ROWS)

    def read(damaged: bytes) -> Any:
        wanted = Wanted(["text"], PIECE_BYTES)
        return list(ArrowFormat().batches(io.BytesIO(damaged), wanted))

    for damaged in (
        content[:-9],
        content[:3000] + content[-3000:],
        content.replace(b"\xff\xff\xff\xff", b"\x00\x00\x00\x00"),
    ):
        with pytest.raises((pa.ArrowInvalid, OSError)):
            read(damaged)


@pytest.mark.parametrize(
    "kind", [ParquetFormat(), TextFormat("csv"), TextFormat("json")]
)
def test_other_formats_are_read_in_bounded_steps(kind: Format) -> None:
    frame = make_table().select(["number", "text"]).to_pandas()
    large: Any = pa.concat_tables([pa.Table.from_pandas(frame)] * 8).to_pandas()
    sink: Any = io.BytesIO()
    if kind.name == "parquet":
        large.to_parquet(sink, row_group_size=len(large))
    elif kind.name == "csv":
        large.to_csv(sink, index=False)
    else:
        large.to_json(sink, orient="records", lines=True)
    file = Counted(sink.getvalue())
    schema = pa.schema([("number", pa.float64()), ("text", pa.string())])

    opened = kind.open(file)
    wanted = Wanted(schema.names, PIECE_BYTES, schema)
    pieces = list(kind.batches(opened, wanted))

    assert sum(piece.num_rows for piece in pieces) == len(large)
    assert max(piece.nbytes for piece in pieces) <= 2 * PIECE_BYTES
    assert file.largest <= 2 * STEP_BYTES
