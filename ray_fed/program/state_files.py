"""A file of values: a zip of arrays with checksums, written whole or not at all.

    manifest.json     what each value is, by name; small values themselves
    0.npy, 1.npy ...  arrays and bytes, read without pickle

All sizes and checksums of a file are checked before anything of it is read; members are
not compressed, so reading takes no more memory than the file has bytes.
"""

import contextlib
import errno
import json
import os
import pathlib
import uuid
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import ray_fed.errors as errors
import ray_fed.program.state_encoding as state_encoding
import ray_fed.program.version_names as version_names
from ray_fed.files import npy, opening

TEMPORARY_SUFFIX = ".tmp"
_FORMAT = 1
_MANIFEST = "manifest.json"

_NO_REGULAR_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""What opening anything but a regular file fails with."""

_NO_ARCHIVE = (None, errno.EINVAL)
"""What reading a regular file that is no archive fails with: places in it that cannot
be, and errors of decoders, which have no number."""


def write_values(path: pathlib.Path, values: Mapping[str, object]) -> None:
    """Write named values to a file, which appears complete or not at all.

    Args:
        path: replaced if it is there; its folder exists.
        values: of the kinds that `state_encoding.Encoder` takes.

    Raises:
        ValueMismatchError: a value is of another kind.
        SavedStateError: there is a folder at the path.
    """
    if path.is_dir() and not path.is_symlink():
        raise errors.SavedStateError(
            f"Expected to save state to the file `{path}`, found a folder of that name:"
            " move it away."
        )
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            write_archive(file, values)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_archive(file: IO[bytes], values: Mapping[str, object]) -> None:
    """Write named values to a file that is open, empty and can seek.

    Raises:
        ValueMismatchError: a value is of a kind that cannot be saved.
    """
    with zipfile.ZipFile(file, "w") as archive:
        encoder = state_encoding.Encoder(archive)
        described = [
            {
                "name": name,
                "value": encoder.describe(value, state_encoding.name_place(name)),
            }
            for name, value in values.items()
        ]
        manifest = {"format": _FORMAT, "values": described}
        archive.writestr(_MANIFEST, json.dumps(manifest))


def _sync_folder(folder: pathlib.Path) -> None:
    """Have the rename survive a power failure, where the file system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_values(path: pathlib.Path) -> dict[str, Any]:
    """Return the values of a file by name; a `SavedObject` for each serialised object.

    Raises:
        StateFormatError: another version of ray_fed wrote it.
        StorageError: the file cannot be opened or read now.
        SavedStateError: it is damaged, or no regular file.
        FileNotFoundError: there is no such file.
    """
    with version_names.telling_read(str(path), OSError), _open(path) as file:
        return read_archive(file, str(path))


def read_archive(file: IO[bytes], where: str) -> dict[str, Any]:
    """Return the values of a file that is open and can seek, by name.

    Args:
        file: to read bytes; not owned.
        where: it is, as an error says it.

    Raises:
        StateFormatError: another version of ray_fed wrote it.
        SavedStateError: the file is damaged.
        OSError: it cannot be read now.
    """
    try:
        return _read(file, where)
    except errors.SavedStateError:
        raise
    except npy.DAMAGES as error:
        failure = _find_failure(error)
        if failure is not None:
            raise failure from None
        raise damage(where, error) from error


def _find_failure(error: Exception) -> OSError | None:
    """Return the failure to read that an error is, or that zipfile took for damage."""
    for each in (error, error.__context__):
        if isinstance(each, OSError) and each.errno not in _NO_ARCHIVE:
            return each
    return None


def _open(path: pathlib.Path) -> IO[bytes]:
    try:
        return opening.open_regular(path)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise damage(path, "a link to nothing") from error
        raise
    except OSError as error:
        if error.errno in _NO_REGULAR_FILE:
            raise damage(path, error.strerror) from error
        raise


def damage(where: object, found: object) -> errors.SavedStateError:
    """Return the error that a version is not as it was written."""
    return errors.SavedStateError(
        f"Expected whole saved state in `{where}`, found it damaged ({found}): delete"
        " it, or load another version."
    )


def _read(file: IO[bytes], where: str) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        _check_sizes(archive, file.seek(0, os.SEEK_END))
        damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"bad checksum of `{damaged}`")
        manifest = json.loads(archive.read(_MANIFEST))
        check_format(manifest["format"], _FORMAT, where)
        decoder = state_encoding.Decoder(archive)
        return {
            described["name"]: decoder.decode(described["value"])
            for described in manifest["values"]
        }


def _check_sizes(archive: zipfile.ZipFile, num_bytes: int) -> None:
    """Refuse members that would take more memory than the file has bytes."""
    members = archive.infolist()
    for member in members:
        is_stored = member.compress_type == zipfile.ZIP_STORED
        if not is_stored or member.file_size != member.compress_size:
            raise zipfile.BadZipFile(f"`{member.filename}` is larger than it says")
    if sum(member.file_size for member in members) > num_bytes:
        raise zipfile.BadZipFile(f"members larger than the file of {num_bytes} bytes")


def check_format(found: object, known: int, where: str) -> None:
    """Refuse what another version of ray_fed wrote.

    Raises:
        StateFormatError: it is not of the format that is known.
    """
    if found != known:
        raise errors.StateFormatError(
            f"Expected saved state of format {known} in `{where}`, found format"
            f" {errors.describe(found)}: read it with the version of ray_fed that wrote"
            " it."
        )
