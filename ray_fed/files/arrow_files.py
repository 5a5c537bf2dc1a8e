"""Reads record batches of Arrow (IPC, Feather) files in pieces of bounded size.

pyarrow reads a whole record batch, however large it is. So a large batch is copied to
the temporary folder first, decompressed step by step. The copy is mapped into memory
again for each piece, so that only the pages of one piece are in memory.

    file     "ARROW1"  schema  dictionaries  batch  batch ...  footer
    copy               schema  dictionaries  batch             a stream of one batch

The format: https://arrow.apache.org/docs/format/Columnar.html, "Serialization and
Interprocess Communication". The metadata are FlatBuffers. This module reads three of
their tables: Message, RecordBatch and BodyCompression (see `Message.fbs` there).
"""

import dataclasses
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.error_texts import describe_process
from ray_fed.files.formats import FileFacts, Format, Wanted, cut_batch
from ray_fed.imports import pyarrow

_STEP_BYTES = 2**20
"""Bytes that are copied at once."""

_MAGIC = b"ARROW1\0\0"
_CONTINUES = 0xFFFFFFFF
_BATCH = 3
_CODECS = ("lz4", "zstd")
_ALIGNED = 8


class _Metadata:
    """The metadata of a message: a FlatBuffer whose numbers can be overwritten."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        self.message = self._read("<I", 0)
        self.kind = self._number(self.message, 1, "<B")
        self.body_bytes = self._number(self.message, 3, "<q")

    def _read(self, layout: str, place: int) -> int:
        return struct.unpack_from(layout, self.content, place)[0]

    def _entry(self, table: int, field: int) -> int:
        """Return the position of a field's entry in the vtable, or 0 if it is unset."""
        fields = table - self._read("<i", table)
        entry = 4 + 2 * field
        return fields + entry if entry < self._read("<H", fields) else 0

    def _place(self, table: int, field: int) -> int:
        entry = self._entry(table, field)
        offset = self._read("<H", entry) if entry else 0
        return table + offset if offset else 0

    def _number(self, table: int, field: int, layout: str) -> int:
        place = self._place(table, field)
        return self._read(layout, place) if place else 0

    def _follow(self, table: int, field: int) -> int:
        place = self._place(table, field)
        return place + self._read("<I", place) if place else 0

    @property
    def batch(self) -> int:
        return self._follow(self.message, 2)

    @property
    def codec(self) -> str | None:
        compression = self._follow(self.batch, 3)
        return _CODECS[self._number(compression, 0, "<b")] if compression else None

    @property
    def buffers(self) -> list[tuple[int, int, int]]:
        """Each buffer's position in the metadata, its offset in the body, and size."""
        start = self._follow(self.batch, 2)
        places = (start + 4 + 16 * i for i in range(self._read("<I", start)))
        return [
            (place, self._read("<q", place), self._read("<q", place + 8))
            for place in places
        ]

    def set_buffer(self, place: int, offset: int, num_bytes: int) -> None:
        struct.pack_into("<qq", self.content, place, offset, num_bytes)

    def set_decompressed(self, body_bytes: int) -> None:
        struct.pack_into("<H", self.content, self._entry(self.batch, 3), 0)
        if body_bytes:  # a field of 0 is left out
            place = self._place(self.message, 3)
            struct.pack_into("<q", self.content, place, body_bytes)


@dataclasses.dataclass(frozen=True)
class _Message:
    """One message of an Arrow file.

    `start` and `body` are the byte offsets of the message and of its data in the file.
    """

    start: int
    metadata: _Metadata
    body: int

    @property
    def stop(self) -> int:
        return self.body + self.metadata.body_bytes


def _read_messages(file: Any) -> Iterator[_Message]:
    at = len(_MAGIC)
    while True:
        file.seek(at)
        prefix = file.read(8)
        size, next_size = struct.unpack("<II", prefix.ljust(8, b"\0"))
        begin = at + 4
        if size == _CONTINUES:
            size, begin = next_size, at + 8
        if size == 0:
            return
        file.seek(begin)
        message = _Message(at, _Metadata(file.read(size)), begin + size)
        if message.metadata.body_bytes < 0:
            raise ValueError("a body of fewer than 0 bytes")
        yield message
        at = message.stop


class ArrowFormat(Format):
    """Arrow (IPC) files, which are also called Feather."""

    name = "arrow"

    @override
    def look(self, file: Any, columns: Sequence[str] = ()) -> FileFacts:
        schema = pyarrow.ipc.open_file(file).schema
        num_bytes = sum(size for _, size in _measure(file)) if columns else 0
        return FileFacts(schema, num_bytes)

    @override
    def batches(self, opened: Any, wanted: Wanted) -> Iterator[Any]:
        names, columns = pyarrow.ipc.open_file(opened).schema.names, wanted.columns
        fields = sorted(names.index(name) for name in columns)
        options = pyarrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        reader = pyarrow.ipc.open_file(opened, options=options)
        measured = _measure(opened)
        batches = [each for each in measured if each[0].metadata.kind == _BATCH]
        before = [each for each, _ in measured if each.metadata.kind != _BATCH]
        if len(batches) != reader.num_record_batches:
            raise pyarrow.ArrowInvalid(
                f"{reader.num_record_batches} record batches in the footer, found"
                f" {len(batches)}"
            )
        for number, (message, size) in enumerate(batches):
            if size <= wanted.num_bytes:
                batch = reader.get_batch(number).select(list(columns))
                yield from cut_batch(batch, wanted.num_bytes)
                continue
            with tempfile.NamedTemporaryFile() as copy:
                _copy_batch(opened, before, message, copy)
                yield from _map_pieces(copy.name, options, wanted)


def _measure(file: Any) -> list[tuple[_Message, int]]:
    """Return the messages of a file, and how many bytes each takes in memory."""
    try:
        return [(each, _count_bytes(file, each)) for each in _read_messages(file)]
    except (struct.error, IndexError, ValueError) as error:
        raise pyarrow.ArrowInvalid(f"no messages of Arrow: {error}") from error


def _map_pieces(path: str, options: Any, wanted: Wanted) -> Iterator[Any]:
    """Yield pieces of the batch in the file `path`, mapped again for each piece."""
    start, count, num_rows = 0, 0, 1
    while start < num_rows:
        stream = pyarrow.ipc.open_stream(pyarrow.memory_map(path), options=options)
        batch = stream.read_next_batch().select(list(wanted.columns))
        del stream
        num_rows = batch.num_rows
        if not count:
            row_bytes = max(1, batch.nbytes // max(1, num_rows))
            count = int(max(1, wanted.num_bytes // row_bytes))
        piece = batch.slice(start, count)
        piece.validate(full=True)  # otherwise a damaged offset would be followed
        yield piece
        del batch, piece
        start += count


def _count_bytes(file: Any, message: _Message) -> int:
    metadata, total = message.metadata, 0
    if metadata.kind != _BATCH or metadata.codec is None:
        return metadata.body_bytes
    for _, offset, size in metadata.buffers:
        if size:
            file.seek(message.body + offset)
            total += max(size, *struct.unpack("<q", file.read(8)))
    return total


def _copy_batch(
    file: Any, before: Sequence[_Message], message: _Message, copy: IO[bytes]
) -> None:
    try:
        for each in before:
            _copy(file, each.start, each.stop - each.start, copy)
        _write_batch(file, message, copy)
        copy.flush()
    except OSError as error:
        if error.errno is None:
            raise  # of arrow: the file is damaged
        raise errors.ResourceError(
            f"Expected room in `{tempfile.gettempdir()}` for a copy of a record batch,"
            f" found {error} in {describe_process()}: set TMPDIR to a folder"
            " with more, or write smaller record batches."
        ) from error


def _write_batch(file: Any, message: _Message, copy: IO[bytes]) -> None:
    metadata = message.metadata
    header = copy.tell()
    copy.seek(8 + len(metadata.content), os.SEEK_CUR)
    body = copy.tell()
    if (codec := metadata.codec) is None:
        _copy(file, message.body, metadata.body_bytes, copy)
    else:
        for place, offset, size in metadata.buffers:
            start = copy.tell()
            if size:
                _copy_buffer(file, message.body + offset, size, codec, copy)
            metadata.set_buffer(place, start - body, copy.tell() - start)
            copy.write(b"\0" * (-copy.tell() % _ALIGNED))
        metadata.set_decompressed(copy.tell() - body)
    copy.seek(header)
    copy.write(struct.pack("<II", _CONTINUES, len(metadata.content)))
    copy.write(metadata.content)


def _copy_buffer(file: Any, start: int, size: int, codec: str, copy: IO[bytes]) -> None:
    file.seek(start)
    (whole,) = struct.unpack("<q", file.read(8))
    if whole == -1:  # compression would have made it larger
        _copy(file, start + 8, size - 8, copy)
        return
    before = copy.tell()
    part = pyarrow.PythonFile(_Part(file, start + 8, size - 8), mode="r")
    with pyarrow.CompressedInputStream(part, codec) as stream:
        while piece := stream.read(_STEP_BYTES):
            copy.write(piece)
    if copy.tell() - before != whole:
        raise pyarrow.ArrowInvalid(
            f"a buffer of {whole} bytes, found {copy.tell() - before}"
        )


def _copy(file: Any, start: int, size: int, copy: IO[bytes]) -> None:
    file.seek(start)
    while size > 0:
        piece = file.read(min(size, _STEP_BYTES))
        if not piece:
            raise pyarrow.ArrowInvalid("it is cut short")
        copy.write(piece)
        size -= len(piece)


class _Part:
    """A range of bytes in a file, with the methods of a file."""

    closed = False

    def __init__(self, file: Any, start: int, size: int) -> None:
        self._file, self._at, self._left = file, start, size

    def read(self, size: int = -1) -> bytes:
        count = self._left if size < 0 else min(size, self._left)
        self._file.seek(self._at)
        piece = self._file.read(count)
        self._at += len(piece)
        self._left -= len(piece)
        return piece

    def close(self) -> None:
        """Leave the file open, because another object owns it."""
