"""Sources of clients in the object store: put once, fetched by whoever reads them."""

import bisect
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import ray
import ray.exceptions
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
from ray_fed.cluster.jobs import Job
from ray_fed.files.opening import describe_executor
from ray_fed.language.structs import Plain
from ray_fed.values import stored
from ray_fed.values.client_references import ClientRun, ClientSource
from ray_fed.values.client_sources import HeldSource

_CHUNK_BYTES = 64 * 2**20
"""Values of clients that are one object: a worker brings whole objects to its node."""

_FETCH_TIMEOUT_S = 300.0

_stored: weakref.WeakKeyDictionary[ClientSource, tuple[Job, ClientSource]]
_stored = weakref.WeakKeyDictionary()
"""Of each source the job and what stands for it in that job's object store."""


def store_run(run: ClientRun) -> tuple[ClientRun, int]:
    """Return a run whose source is in the object store, put there the first time.

    Returns:
        The run, and how many bytes of values were put.
    """
    source, num_bytes = _stand_in(run.source)
    return dataclasses.replace(run, source=source, weights=None), num_bytes


def _stand_in(source: ClientSource) -> tuple[ClientSource, int]:
    """Return what stands for a source in the object store, and the bytes put now."""
    if isinstance(source, StoredSource):
        return source, 0
    num_bytes = 0
    job = Job.current()
    if source not in _stored or _stored[source][0] != job:
        opened, num_bytes = source, source.num_bytes
        if source.base is not None:
            base, num_bytes = _stand_in(source.base)
            opened = source.over(base)
        _stored[source] = (job, _store_source(opened))
    return _stored[source][1], num_bytes


def _store_source(source: ClientSource) -> "StoredSource":
    opened = source
    if isinstance(source, HeldSource):
        chunks = list(_chunks(source.held))
        opened = _ChunkedSource(
            source.token,
            [start for start, _ in chunks],
            [ray.put(chunk) for _, chunk in chunks],
        )
    return StoredSource(source.token, source.is_resident, _put(opened))


def _put(source: ClientSource) -> Any:
    """Return a reference to a source in the object store.

    Raises:
        UnsupportedError: the user's function, or what it refers to, is not picklable.
        ContextStateError: it refers to what was in a Ray that was shut down.
    """
    try:
        return ray.put(source)
    except (ray.exceptions.RayError, errors.ContextStateError):
        raise
    except Exception as error:
        found = "ids" if source.function is None else errors.describe(source.function)
        reason = error_texts.message_of(error.__cause__ or error)
        raise errors.UnsupportedError(
            "Expected clients whose ids and function can be pickled, to travel to"
            f" workers, found `{found}`: {reason}. Make what cannot be pickled, such as"
            " a lock, an open file or a `tf.function` that was called, inside of the"
            " function."
        ) from error


def _chunks(held: Sequence[Plain]) -> Iterator[tuple[int, list[Plain]]]:
    """Yield runs of values of bounded size, each with its first position."""
    chunk: list[Plain] = []
    num_bytes = 0
    for position, value in enumerate(held):
        size = stored.count_bytes(value)
        if chunk and num_bytes + size > _CHUNK_BYTES:
            yield position - len(chunk), chunk
            chunk, num_bytes = [], 0
        chunk.append(value)
        num_bytes += size
    yield len(held) - len(chunk), chunk


def fetch(reference: Any) -> Any:
    """Return an object; waits for it on the calling thread, for some minutes."""
    # On the one thread of a worker, which has nothing else to do until it is there.
    return ray.get(reference, timeout=_FETCH_TIMEOUT_S)  # noqa: TID251


class StoredSource(ClientSource):
    """A source in the object store; fetched by whoever reads it first.

    Args:
        token: of the source.
        is_resident: of the source.
        reference: to the source.
    """

    opens_once = True

    def __init__(self, token: str, is_resident: bool, reference: Any) -> None:  # noqa: FBT001
        self.token = token
        self.is_resident = is_resident
        self.reference = reference
        self._opened: ClientSource | None = None

    @override
    def __reduce__(self) -> Any:
        return StoredSource, (self.token, self.is_resident, self.reference)

    @override
    def read(self, position: int) -> Plain:
        return self.opened().read(position)

    @override
    def opened(self) -> ClientSource:
        if self._opened is None:
            try:
                self._opened = fetch(self.reference)
            except ray.exceptions.RaySystemError as error:
                raise _missing_code(error) from error
        return cast("ClientSource", self._opened)

    @override
    def opened_base(self) -> ClientSource | None:
        return None if self._opened is None else self._opened.base


def _missing_code(error: ray.exceptions.RaySystemError) -> Exception:
    """Return the error that a worker lacks what clients' function or ids are made of.

    Itself where that is not why it could not be read.
    """
    cause = cast("object", error.client_exc)
    match cause:
        case ModuleNotFoundError():
            missing = f"the module `{cause.name}`"
        case ImportError() | AttributeError():
            missing = f"the code of this process ({cause})"
        case _:
            return error
    return errors.UnsupportedError(
        f"Expected {missing}, which the function or the ids of the clients are from,"
        f" found it missing in {describe_executor()}: install it on every machine, send"
        ' it with the job by `Config(runtime_env={"working_dir": "."})` or by'
        ' "py_modules", or define the function in the program itself.'
    )


class _ChunkedSource(ClientSource):
    """Values of clients as objects of many; arrays are read without a copy."""

    is_resident = True

    def __init__(self, token: str, starts: list[int], references: list[Any]) -> None:
        self.token = token
        self._starts = starts
        self._references = references
        self._fetched: dict[int, list[Plain]] = {}

    @override
    def __reduce__(self) -> Any:
        return _ChunkedSource, (self.token, self._starts, self._references)

    @override
    def read(self, position: int) -> Plain:
        index = bisect.bisect_right(self._starts, position) - 1
        if index not in self._fetched:
            self._fetched[index] = fetch(self._references[index])
        return self._fetched[index][position - self._starts[index]]
