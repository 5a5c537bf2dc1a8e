"""Versions of state on any file system that fsspec knows, such as an object store.

Those have no rename that happens at once, and a killed program may leave any object
behind. So what makes a version is written last:

    program_state_7.3f0c....part     the state's archive, under a name of its own
    program_state_7.json             its name, size and SHA-256: now version 7 is there

A version is removed in the other order. A part that no manifest names is removed by the
next write.
"""

import hashlib
import json
import re
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from typing import IO, Any

import ray_fed.errors as errors
import ray_fed.program.state_files as state_files
import ray_fed.program.version_names as version_names
from ray_fed.files import opening

_FORMAT = 1
_SUFFIX = ".json"
_CHUNK_BYTES = 2**20
_MEMORY_BYTES = 2**26
"""A larger archive is on the local disk while it is written or read."""

_OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"))
"""Those without folders: to make one would make a bucket, which is not ours to do."""


def has_folders(uri: str) -> bool:
    """Return whether folders of a place, given as a path or URI, are to be made."""
    return uri.partition("://")[0] not in _OBJECT_STORES


class RemoteVersions:
    """An archive and a manifest a version; see `versions.Versions`.

    Args:
        uri: of the folder.
        prefix: of names.

    Raises:
        UnsupportedError: fsspec does not know the URI, or lacks a package for it.
        StorageError: the archive that the URI names cannot be opened.
    """

    def __init__(self, uri: str, prefix: str) -> None:
        self._uri = uri.rstrip("/")
        self._prefix = prefix
        self._files, self._root = _locate(self._uri)

    def find(self) -> list[int]:
        """Return the versions that have a manifest, ascending."""
        return version_names.versions_in(self._names(), self._prefix, _SUFFIX)

    def removable(self) -> list[int]:
        """Return all of them."""
        return self.find()

    def _names(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:  # what fsspec raises has no base of its own
            raise version_names.unlisted(self._uri, error) from error
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, version: int) -> dict[str, Any]:
        """Return the values of a version, by name."""
        where = self.where(version)
        with version_names.telling_read(where, Exception):
            return self._read(version, where)

    def _read(self, version: int, where: str) -> dict[str, Any]:
        manifest = _Manifest.parse(
            self._files.cat_file(self._path(f"{self._prefix}{version}{_SUFFIX}")), where
        )
        if not self._is_part(manifest.part, version):
            raise state_files.damage(where, f"the part `{manifest.part}`")
        with tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as content:
            try:
                with self._files.open(self._path(manifest.part), "rb") as part:
                    found = _copy(part, content)
            except FileNotFoundError as error:
                raise state_files.damage(where, "its part is not there") from error
            if found != (manifest.num_bytes, manifest.sha256):
                raise state_files.damage(where, "its part is not as it was written")
            return state_files.read_archive(content, where)

    def write(self, version: int, values: Mapping[str, object]) -> None:
        """Write a version: its part, then its manifest; then remove parts of none."""
        part = f"{self._prefix}{version}.{uuid.uuid4().hex}.part"
        with (
            tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as content,
            version_names.telling_storage(self.where(version), Exception),
        ):
            state_files.write_archive(content, values)
            content.seek(0)
            if has_folders(self._uri):
                self._files.makedirs(self._root, exist_ok=True)
            with self._files.open(self._path(part), "wb") as file:
                manifest = _Manifest(part, *_copy(content, file))
            self._files.pipe_file(
                self._path(f"{self._prefix}{version}{_SUFFIX}"), manifest.dump()
            )
            self._remove_parts(version, part)

    def _remove_parts(self, version: int, kept: str) -> None:
        """Remove the parts of a version but one, and those that no manifest names."""
        names = self._names()
        whole = version_names.versions_in(names, self._prefix, _SUFFIX)
        others = set(whole) - {version}
        for name in names:
            of_version = self._version_of_part(name)
            if of_version is not None and of_version not in others and name != kept:
                self._delete(name)

    def remove(self, versions: Sequence[int]) -> None:
        """Remove the manifests of versions, then their parts."""
        removed = set(versions)
        names = self._names()
        with version_names.telling_storage(self._uri, Exception, verb="remove from"):
            for version in set(self.find()) & removed:
                self._delete(f"{self._prefix}{version}{_SUFFIX}")
            for name in names:
                if self._version_of_part(name) in removed:
                    self._delete(name)

    def where(self, version: int) -> str:
        """Return the URI of a version's manifest."""
        return f"{self._uri}/{self._prefix}{version}{_SUFFIX}"

    def _is_part(self, name: str, version: int) -> bool:
        return self._version_of_part(name) == version

    def _version_of_part(self, name: str) -> int | None:
        stem, _, ending = name.partition(".")
        if not re.fullmatch(r"[0-9a-f]{32}\.part", ending):
            return None
        found = version_names.versions_in([stem], self._prefix, "")
        return found[0] if found else None

    def _delete(self, name: str) -> None:
        self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _Manifest:
    """What makes a version of a part.

    Attributes:
        part: its name.
        num_bytes: of it.
        sha256: of it, in hexadecimal digits.
    """

    def __init__(self, part: str, num_bytes: int, sha256: str) -> None:
        self.part = part
        self.num_bytes = num_bytes
        self.sha256 = sha256

    def dump(self) -> bytes:
        """Return it as JSON."""
        return json.dumps({"format": _FORMAT, **vars(self)}).encode()

    @classmethod
    def parse(cls, content: bytes, where: str) -> "_Manifest":
        """Return the manifest that JSON describes.

        Raises:
            StateFormatError: another version of ray_fed wrote it.
            SavedStateError: it is cut or damaged.
        """
        try:
            fields = dict(json.loads(content))
            state_files.check_format(fields.pop("format"), _FORMAT, where)
            manifest = cls(**fields)
        except errors.SavedStateError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise state_files.damage(where, f"no manifest: {error}") from error
        if not isinstance(manifest.part, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise state_files.damage(where, "a manifest without the name of a part")
        return manifest


def _copy(source: IO[bytes] | Any, target: IO[bytes] | Any) -> tuple[int, str]:
    """Copy the rest of a file; return its number of bytes and their SHA-256."""
    digest, num_bytes = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        target.write(chunk)
        digest.update(chunk)
        num_bytes += len(chunk)
    return num_bytes, digest.hexdigest()


def _locate(uri: str) -> tuple[Any, str]:
    fsspec = opening.import_extra("fsspec.core")
    # Only a chain, such as zip://a::b.zip, has a file opened at once.
    with version_names.telling_storage(uri, Exception, verb="open"):
        try:
            files, root = fsspec.url_to_fs(uri)
        except (ImportError, ValueError) as error:
            raise errors.UnsupportedError(
                f"Expected a path, or a URI that fsspec knows, found `{uri}` ({error}):"
                " install what it names, such as `pip install 'ray-fed[s3]'` for s3://."
            ) from error
    return files, root.rstrip("/")
