"""A log of byte records in files. Whenever it is read, each record is whole or absent.

    history_0.log       0d9f1c7a {...}      a checksum and a record on each line
    history_512.log     the records from number 512

On a file system of this machine, there is one file, and records are appended to it.
Other file systems cannot append. There, the last file is written anew for each append
until it is large, and then the next file begins. Sixteen files of about the same size
are joined. So the number of files, and the bytes that are written for each record, grow
at most with the logarithm of the number of records.
"""

import contextlib
import itertools
import math
import os
import re
import zlib
from collections.abc import Iterable, Sequence

import ray_fed.errors as errors
from ray_fed.program.checkpoint_store import Folder, sync_folder, telling_storage

_TAIL_BYTES = 2**16
"""Size of the last file at which a new file begins, if files cannot be appended to."""

_MOST_ALIKE = 16
"""Number of files of about the same size that are joined."""

_ENDING = ".log"


def _to_line(record: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(record), record)


def _to_records(content: bytes) -> list[bytes]:
    """Return the records of a file up to the first damaged or incomplete record."""
    records: list[bytes] = []
    *lines, _ = content.split(b"\n")
    for line in lines:
        record = line[9:]
        if line[:9] != b"%08x " % zlib.crc32(record):
            break
        records.append(record)
    return records


class RecordLog(Folder):
    """A log of byte records in a folder, with one writer at a time.

    For arguments and errors see `Folder`. `where` is the pattern of the files' names.
    """

    def __init__(self, root_dir: object, prefix: str) -> None:
        super().__init__(root_dir, prefix)
        self._name = re.compile(re.escape(prefix) + r"(0|[1-9]\d{0,18})\.log", re.ASCII)
        self.where = f"{self._uri}/{prefix}*{_ENDING}"
        self._num_records = 0
        self._sizes: dict[int, int] = {0: 0}  # bytes of each file by its first record
        self._tail = b""  # the content of the last file, if it cannot be appended to
        self._has_stale = True
        self._added = 0, 0  # records and bytes of the last `append`

    def read(self) -> list[bytes]:
        """Return the records in order, up to the first damaged or missing record.

        Raises:
            StorageError: The records cannot be read now.
        """
        records: list[bytes] = []
        for _ in range(3):  # the writer may have joined files since they were listed
            records.clear()
            firsts = sorted(self._find())
            for first in firsts:
                if first > len(records):
                    break
                found = self._read_file(first)
                if found is None:
                    break
                if first + len(found) > len(records):
                    records[first:] = found
            else:
                break
        return records

    def resume(self, records: Sequence[bytes]) -> None:
        """Let `append` continue after `records`, the first records of the log.

        The next `append` removes all later records from the files.
        """
        self._num_records = len(records)
        firsts = sorted({0, *(f for f in self._find() if f < len(records))})
        ends = [*firsts[1:], len(records)]
        lines = [
            [*map(_to_line, records[a:b])] for a, b in zip(firsts, ends, strict=True)
        ]
        self._sizes = {
            first: sum(map(len, inside))
            for first, inside in zip(firsts, lines, strict=True)
        }
        self._tail = b"" if self._is_local else b"".join(lines[-1])
        self._has_stale = True

    def append(self, records: Iterable[bytes]) -> None:
        """Write records after the existing records. They survive a power failure.

        Raises StorageError if they cannot be written, or if earlier records were
        removed.
        """
        lines = [*map(_to_line, records)]
        added = b"".join(lines)
        self._added = 0, 0
        if not lines:
            return
        if self._has_stale:
            self._remove(first for first in self._find() if first not in self._sizes)
            self._has_stale = False
        if len(self._tail) >= _TAIL_BYTES:
            self._join()
            self._sizes[self._num_records], self._tail = 0, b""
        last = max(self._sizes)
        with telling_storage(self._where_of(last), Exception):
            if self._is_local:
                self._append_here(last, added)
            else:
                self.write_file(self._name_of(last), self._tail + added)
                self._tail += added
        self._sizes[last] += len(added)
        self._num_records += len(lines)
        self._added = len(lines), len(added)

    def undo(self) -> None:
        """Undo the last `append`, because the state of its records was not saved.

        On a full disk, this frees the space of these records.
        """
        (num_records, num_bytes), self._added = self._added, (0, 0)
        last = max(self._sizes)
        self._num_records -= num_records
        self._sizes[last] -= num_bytes
        self._tail = self._tail[: len(self._tail) - num_bytes]
        if self._is_local and num_bytes:
            with contextlib.suppress(OSError):
                os.truncate(f"{self._root}/{self._name_of(last)}", self._sizes[last])

    def _append_here(self, first: int, added: bytes) -> None:
        path, size = f"{self._root}/{self._name_of(first)}", self._sizes[first]
        self._system.makedirs(self._root, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with open(descriptor, "r+b") as file:  # noqa: PTH123 (of a descriptor)
            found = file.seek(0, os.SEEK_END)
            if found < size:
                raise errors.StorageError(
                    f"Expected {size} bytes in `{path}`, which this run wrote, found"
                    f" {found}: another program changed it. Begin anew with another"
                    " `storage_path`."
                )
            if found > size:  # left by a killed or failed append
                file.truncate(size)
                file.seek(size)
            try:
                file.write(added)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):  # on a full disk it makes room
                    os.truncate(path, size)
                raise
        if not size:
            sync_folder(self._root)

    def _join(self) -> None:
        """Join the last files if there are enough files of about the same size."""
        while True:
            firsts = sorted(self._sizes)
            alike = firsts[-_MOST_ALIKE:]
            levels = {_level_of(self._sizes[first]) for first in alike}
            if len(alike) < _MOST_ALIKE or len(levels) > 1:
                return
            lines: list[bytes] = []
            for first, end in itertools.pairwise([*alike, self._num_records]):
                # If an earlier join was killed, a file can have records of later files.
                found = (self._read_file(first) or [])[: end - first]
                lines += map(_to_line, found)
            content = b"".join(lines)
            if len(content) != sum(self._sizes[first] for first in alike):
                return  # one is damaged: the others are left as they are
            with telling_storage(self._where_of(alike[0]), Exception):
                self.write_file(self._name_of(alike[0]), content)
            self._remove(alike[1:])
            for first in alike[1:]:
                del self._sizes[first]
            self._sizes[alike[0]] = len(content)

    def _read_file(self, first: int) -> list[bytes] | None:
        """Return the valid records at the beginning of a file, or None without it."""
        where = self._where_of(first)
        telling = telling_storage(
            where, Exception, verb="read", lets_through=FileNotFoundError
        )
        try:
            with telling, self.open_file(self._name_of(first), where) as file:
                return _to_records(file.read())
        except FileNotFoundError:
            return None

    def _find(self) -> list[int]:
        matches = [self._name.fullmatch(name) for name, _ in self.list_names()]
        return [int(match[1]) for match in matches if match]

    def _remove(self, firsts: Iterable[int]) -> None:
        with telling_storage(self._uri, Exception, verb="remove records in"):
            for first in firsts:
                self.remove_file(self._name_of(first))

    def _name_of(self, first: int) -> str:
        return f"{self._prefix}{first}{_ENDING}"

    def _where_of(self, first: int) -> str:
        return f"{self._uri}/{self._name_of(first)}"


def _level_of(num_bytes: int) -> int:
    """Return how often files of `_TAIL_BYTES` were joined into a file of this size."""
    return int(math.log(max(1.0, num_bytes / _TAIL_BYTES), _MOST_ALIKE) + 1e-9)
