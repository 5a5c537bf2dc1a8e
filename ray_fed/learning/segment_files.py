"""Files with rows of clients, each written once: segments.

    segment     length of the header | header: clients, CRC-32 of each row | rows

A segment's name is a digest of its header: who knows the name can tell whether the file
is whole.
"""

import contextlib
import dataclasses
import hashlib
import json
import uuid
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import ray_fed.errors as errors
from ray_fed.program.remote_versions import has_folders
from ray_fed.program.version_names import telling_storage

_FORMAT = 1
_LENGTH_BYTES = 8

ClientId = str | int
Row = tuple[ClientId, bytes]


@dataclasses.dataclass(eq=False)
class Segment:
    """A file.

    Attributes:
        name: in its folder.
        first_byte: of its first row.
        checks: the CRC-32 of each row.
        num_live: rows that count.
    """

    name: str
    first_byte: int
    checks: Sequence[int]
    num_live: int = 0


class SegmentFiles:
    """The segments of a folder, as files.

    Args:
        folder: of any file system that fsspec knows; made by the first segment.
        row_bytes: of each row.
    """

    def __init__(self, folder: str, row_bytes: int) -> None:
        self._where = folder
        with self._telling("open"):
            self._system, self._folder = import_fsspec().core.url_to_fs(folder)
        self._row_bytes = row_bytes

    def names(self) -> set[str]:
        """Return the names of all files that are there."""
        with self._telling("read"):
            there = self._system.exists(self._folder)
            paths = self._system.ls(self._folder, detail=False) if there else []
        return {str(path).rpartition("/")[2] for path in paths}

    def write(self, rows: Sequence[Row]) -> Segment:
        """Write rows, at least one, to a new file."""
        checks = [zlib.crc32(row) for _, row in rows]
        fields = {
            "format": _FORMAT,
            "row_bytes": self._row_bytes,
            "nonce": uuid.uuid4().hex,  # no two segments have one name
            "clients": [client for client, _ in rows],
            "crc32": checks,
        }
        header = json.dumps(fields).encode()
        name = _name_of(header)
        if has_folders(self._where):
            with self._telling("write"):
                self._system.makedirs(self._folder, exist_ok=True)
        with self._open(name, "wb") as file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            for _, row in rows:
                file.write(row)
        return Segment(name, _LENGTH_BYTES + len(header), checks)

    def read(
        self, segment: Segment, wanted: Iterable[tuple[int, ClientId]]
    ) -> list[Row]:
        """Return rows of a file.

        Args:
            segment: the file.
            wanted: which row, and whose it is.
        """
        rows: list[Row] = []
        with self._open(segment.name, "rb") as file:
            for index, client in sorted(wanted, key=lambda place: place[0]):
                file.seek(segment.first_byte + index * self._row_bytes)
                row = file.read(self._row_bytes)
                is_whole = len(row) == self._row_bytes
                if not is_whole or zlib.crc32(row) != segment.checks[index]:
                    raise self._damage(segment.name, f"the row of `{client}`")
                rows.append((client, row))
        return rows

    def read_header(self, name: str) -> tuple[Segment, Sequence[ClientId]]:
        """Return a file that was written before, and whose its rows are."""
        try:
            with self._open(name, "rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                file.seek(0, 2)
                num_bytes = file.tell()
                if length > num_bytes:
                    raise self._damage(name, "its header")
                file.seek(_LENGTH_BYTES)
                header = file.read(length)
        except errors.StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise self._damage(name, "it is not there") from None
            raise
        if _name_of(header) != name:
            raise self._damage(name, "its header")
        found: Mapping[str, Any] = json.loads(header)
        if found["format"] != _FORMAT or found["row_bytes"] != self._row_bytes:
            raise self._damage(name, "rows of another kind")
        first = _LENGTH_BYTES + length
        if num_bytes != first + len(found["clients"]) * self._row_bytes:
            raise self._damage(name, "it is cut off")
        return Segment(name, first, found["crc32"]), found["clients"]

    @contextlib.contextmanager
    def _open(self, name: str, mode: str) -> Generator[Any]:
        verb = "read" if mode == "rb" else "write"
        with (
            self._telling(verb),
            self._system.open(f"{self._folder}/{name}", mode) as file,
        ):
            yield file

    def _telling(self, verb: str) -> contextlib.AbstractContextManager[None]:
        return telling_states(self._where, verb)

    def _damage(self, name: str, what: str) -> errors.SavedStateError:
        return errors.SavedStateError(
            f"Expected client states as they were written in `{self._where}/{name}`,"
            f" found damage: {what}."
        )

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that is not there is no error."""
        with self._telling("remove"):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(f"{self._folder}/{name}")

    def clear(self) -> None:
        """Remove the folder."""
        with self._telling("remove"):
            if self._system.exists(self._folder):
                self._system.rm(self._folder, recursive=True)


def _name_of(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()[:32]


def telling_states(where: str, verb: str) -> contextlib.AbstractContextManager[None]:
    """Tell what a file system raises as StorageError, see `telling_storage`.

    Args:
        where: client states are.
        verb: what is done there, such as "read".
    """
    # What fsspec raises has no base of its own.
    return telling_storage(where, Exception, verb=f"{verb} client states in")


def import_fsspec() -> Any:
    """Return the module `fsspec`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import fsspec
    except ImportError as error:
        raise errors.ConfigError(
            "Expected fsspec to keep client states in files, found none:"
            ' pip install "ray-fed[data]".'
        ) from error
    return fsspec
