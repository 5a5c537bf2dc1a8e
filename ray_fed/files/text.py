"""Reads CSV files and files of JSON lines, plain or compressed.

Arrow guesses the types of columns from the first block of a file. It seeks in files, so
a compressed file is decompressed into the temporary folder first.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, ClassVar, Literal

from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.error_texts import describe_process
from ray_fed.files.formats import EXPANSION, FileFacts, Format, Wanted, cut_batch
from ray_fed.imports import pyarrow

COMPRESSED = (".gz", ".bz2", ".zst", ".zstd", ".lz4")
"""Endings of the names of compressed files."""

_CODECS = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh91AY&": "bz2",
    b"BZh9\x17rE8": "bz2",  # a first member without content
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x50\x2a\x4d\x18": "zstd",  # the frame of sizes with which `pzstd` begins
    b"\x04\x22\x4d\x18": "lz4",
}
"""First bytes of compressed files that Arrow can decompress, and the codec."""

_OTHER_CODECS = {b"\xfd7zXZ\x00": "xz", b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7z"}
"""First bytes of compressed files that Arrow cannot decompress, and the codec."""

_MAGIC_BYTES = 8

_STEP_BYTES = 2**20

_HEAD_BYTES = 8 * 2**20
"""Bytes of text that are decompressed to find the names and types of columns. Arrow
looks at the first block, of 1 MiB."""


class TextFormat(Format):
    """The format of CSV files, or of files with a JSON object on each line."""

    is_text: ClassVar[bool] = True

    def __init__(self, name: Literal["csv", "json"]) -> None:
        self.name = name

    @override
    def look(self, file: Any, columns: Sequence[str] = ()) -> FileFacts:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        with self._decompress(file, _HEAD_BYTES) as opened:
            return FileFacts(
                self._fragment(opened).physical_schema, EXPANSION * num_bytes
            )

    @override
    def open(self, file: Any) -> Any:
        return self._decompress(file)

    @override
    def batches(self, opened: Any, wanted: Wanted) -> Iterator[Any]:
        scanner = self._fragment(opened).scanner(
            schema=wanted.schema,
            columns=list(wanted.columns),
            use_threads=False,
            batch_readahead=0,
            fragment_readahead=0,
        )
        for batch in scanner.to_batches():
            yield from cut_batch(batch, wanted.num_bytes)

    def _fragment(self, opened: Any) -> Any:
        is_csv, datasets = self.name == "csv", pyarrow.dataset
        kind = datasets.CsvFileFormat if is_csv else datasets.JsonFileFormat
        return kind().make_fragment(opened)

    def _decompress(self, file: Any, num_bytes: float = math.inf) -> Any:
        """Return a file, or a decompressed copy of it if it is compressed.

        The compressed file is closed. The copy has about `num_bytes`, in whole lines.
        Raises UnsupportedError for an unknown compression, and ResourceError if the
        temporary folder is full.
        """
        begin = bytes(file.read(_MAGIC_BYTES))
        file.seek(0)
        if (other := _codec_of(begin, _OTHER_CODECS)) is not None:
            raise errors.UnsupportedError(
                f"Expected {self.name} files, plain or compressed by one of"
                f" {sorted(set(_CODECS.values()))}, found compression by {other}:"
                " decompress the files, or compress them by one of these."
            )
        codec = _codec_of(begin, _CODECS)
        if codec is None:
            return file
        copy = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the caller)
        try:
            _decompress(file, codec, copy, num_bytes)
        except BaseException:
            copy.close()
            raise
        return copy


def _codec_of(begin: bytes, codecs: Mapping[bytes, str]) -> str | None:
    if begin.startswith(b"BZh"):  # the fourth byte is the level
        begin = begin[:3] + b"9" + begin[4:]
    return next(
        (codec for magic, codec in codecs.items() if begin.startswith(magic)), None
    )


def _decompress(file: Any, codec: str, plain: IO[bytes], num_bytes: float) -> None:
    with pyarrow.CompressedInputStream(file, codec) as stream:
        piece = b"\n"
        while plain.tell() < num_bytes and (piece := stream.read(_STEP_BYTES)):
            try:
                plain.write(piece)
            except OSError as error:
                raise errors.ResourceError(
                    f"Expected room in `{tempfile.gettempdir()}`, where"
                    f" {describe_process()} decompresses a file, found {error}: set"
                    " TMPDIR to a folder with more."
                ) from error
    if piece and b"\n" in piece:  # arrow would read half a line
        plain.truncate(plain.tell() - len(piece) + piece.rindex(b"\n") + 1)
    plain.seek(0)
