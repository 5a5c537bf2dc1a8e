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
from ray_fed.files import npy, opening

TEMPORARY_SUFFIX = ".tmp"
_FORMAT = 1
_MANIFEST = "manifest.json"
_OF_THIS_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What opening a file fails with however whole the file is."""


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
            with zipfile.ZipFile(file, "w") as archive:
                _write(archive, values)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _write(archive: zipfile.ZipFile, values: Mapping[str, object]) -> None:
    encoder = state_encoding.Encoder(archive)
    described = [
        {"name": name, "value": encoder.describe(value, f"`{name}`")}
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
        SavedStateError: the file is damaged, of another format, or no regular file.
        FileNotFoundError: there is no such file.
    """
    with _open(path) as file:
        try:
            return _read(file, path)
        except errors.SavedStateError:
            raise
        except npy.DAMAGES as error:
            raise _damage(path, error) from error


def _open(path: pathlib.Path) -> IO[bytes]:
    try:
        return opening.open_regular(path)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise _damage(path, "a link to nothing") from error
        raise
    except OSError as error:
        if error.errno in _OF_THIS_PROCESS:
            raise
        raise _damage(path, error.strerror) from error


def _damage(path: pathlib.Path, found: object) -> errors.SavedStateError:
    return errors.SavedStateError(
        f"Expected whole saved state in `{path}`, found it damaged ({found}): delete"
        " it, or load another version."
    )


def _read(file: IO[bytes], path: pathlib.Path) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        _check_sizes(archive, os.fstat(file.fileno()).st_size)
        damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"bad checksum of `{damaged}`")
        manifest = json.loads(archive.read(_MANIFEST))
        _check_format(manifest["format"], path)
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


def _check_format(found: object, path: pathlib.Path) -> None:
    if found != _FORMAT:
        raise errors.SavedStateError(
            f"Expected saved state of format {_FORMAT} in `{path}`, found format"
            f" {found}: read it with the version of ray_fed that wrote it."
        )
