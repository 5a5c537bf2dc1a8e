"""Caches graphs in memory and in the user's cache folder.

The key of a graph is a hash of everything that the graph is made from. The folder's
path contains a hash of ray_fed's source and of the versions of Python, TensorFlow,
Keras and federated_language. A file gets its name when it is complete, so several
processes can use one folder. It begins with a hash of its content, so damaged files are
ignored. The folder keeps up to 1 GiB of the files that were used last.

The environment variable `RAY_FED_GRAPH_CACHE` names another folder, or is "off".
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import ray_fed.tracebacks as tracebacks
from ray_fed.values.lru_cache import LruCache

_FOLDER_BYTES = 2**30
_FILE_BYTES = 2**26
_MEMORY_BYTES = 2**28
_DIGEST_BYTES = 32

_memory: LruCache[str, bytes] = LruCache(1024, max_weight=_MEMORY_BYTES)


def find(key: str) -> tuple[Any, bytes] | None:
    """Return the notes and the serialized graph that `put` stored by a key, or None."""
    folder = _folder()
    content = None if folder is None else _memory.find(key)
    if folder is not None and content is None:
        with contextlib.suppress(OSError):
            written = (folder / key).read_bytes()
            digest, content = written[:_DIGEST_BYTES], written[_DIGEST_BYTES:]
            if hashlib.sha256(content).digest() != digest:
                return None
            os.utime(folder / key)
            _memory.put(key, content, len(content))
    if content is None:
        return None
    notes, graph = content.split(b"\n", 1)
    return json.loads(notes), graph


def put(key: str, notes: Any, graph: bytes) -> None:
    """Store a serialized graph and notes, a JSON value, in memory and in the folder.

    `key` is the hash of everything that the graph is made from, in hexadecimal digits.
    """
    folder = _folder()
    if folder is None:
        return
    content = json.dumps(notes).encode() + b"\n" + graph
    _memory.put(key, content, len(content))
    if len(content) > _FILE_BYTES:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
        Path(name).replace(folder / key)
        _drop_oldest(folder.parent)


def _drop_oldest(root: Path) -> None:
    stats = [(path, path.stat()) for path in root.glob("*/*")]
    stats.sort(key=lambda pair: pair[1].st_mtime)
    excess = sum(stat.st_size for _, stat in stats) - _FOLDER_BYTES
    for path, stat in stats:
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= stat.st_size


def _folder() -> Path | None:
    named = os.environ.get(tracebacks.GRAPH_CACHE, "")
    if named == "off":
        return None
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with contextlib.suppress(RuntimeError):  # a user without a home
        return Path(named or caches / "ray_fed").expanduser() / _versions()
    return None


@functools.cache
def _versions() -> str:
    import keras
    import tensorflow as tf

    language = importlib.metadata.version("federated-language")
    named = (platform.python_version(), tf.__version__, keras.__version__, language)
    digest = hashlib.sha256(repr(named).encode())
    source = Path(__file__).parents[2]
    for path in sorted(source.rglob("*.py")):
        digest.update(path.relative_to(source).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]
