"""All values of clients in one file, which is there whole or not at all.

length of the header | header: clients, types | rows | CRC-32 of header and rows
"""

import contextlib
import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray_fed.errors as errors
from ray_fed.learning.segment_files import (
    ClientId,
    Row,
    import_fsspec,
    telling_states,
)

_LENGTH_BYTES = 8
_CHECK_BYTES = 4


def write_states(
    path: str, types: Sequence[Any], clients: Sequence[ClientId], rows: Iterable[bytes]
) -> None:
    """Write rows of clients to a file.

    Args:
        path: of any file system that fsspec knows; its folder is made.
        types: what rows hold, as JSON has it.
        clients: whose rows they are, in order.
        rows: one for each.

    Raises:
        StorageError: it cannot be written.
    """
    header = json.dumps({"clients": list(clients), "types": types}).encode()
    system, place = import_fsspec().core.url_to_fs(path)
    unfinished = f"{place}.{uuid.uuid4().hex}"
    with telling_states(path, "write"):
        system.makedirs(place.rpartition("/")[0] or ".", exist_ok=True)
        try:
            with system.open(unfinished, "wb") as file:
                file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
                check = zlib.crc32(header)
                for row in rows:
                    check = zlib.crc32(row, check)
                    file.write(row)
                file.write(check.to_bytes(_CHECK_BYTES, "little"))
            system.mv(unfinished, place)
        except BaseException:
            with contextlib.suppress(Exception):  # it may not be there
                system.rm_file(unfinished)
            raise


def read_states(path: str, types: Sequence[Any], row_bytes: int) -> Iterator[Row]:
    """Yield clients and their rows of a file, and check the file at its end.

    Args:
        path: of the file.
        types: what rows are to hold, as JSON has it.
        row_bytes: of each.

    Raises:
        StorageError: it cannot be read.
        SavedStateError: it is damaged, or of other values.
    """
    with (
        telling_states(path, "read"),
        import_fsspec().open(path, "rb") as file,
    ):
        content, header = _read_header(file, path)
        if header["types"] != types:
            raise errors.SavedStateError(
                f"Expected values of types {types} in `{path}`, found"
                f" {header['types']}."
            )
        check = zlib.crc32(content)
        for client in header["clients"]:
            row = file.read(row_bytes)
            if len(row) != row_bytes:
                raise errors.SavedStateError(
                    f"Expected {row_bytes} bytes of client `{client}` in `{path}`,"
                    f" found {len(row)}: the file is cut off."
                )
            check = zlib.crc32(row, check)
            yield client, row
        if file.read() != check.to_bytes(_CHECK_BYTES, "little"):
            raise errors.SavedStateError(
                f"Expected client states as they were saved in `{path}`, found another"
                " checksum: the file is damaged."
            )


def _read_header(file: Any, path: str) -> tuple[bytes, Any]:
    try:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        content = file.read(size)
        return content, json.loads(content)
    except (ValueError, OverflowError, MemoryError) as error:
        raise errors.SavedStateError(
            f"Expected a file that ClientStates saved, found `{path}`, whose header"
            " cannot be read."
        ) from error
