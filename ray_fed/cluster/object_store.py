"""What travels by reference: values, sources of clients and large kernels.

Each is put into the object store once, and fetched by whoever reads it. What makes a
kernel large are constants of its graphs, such as a pretrained base: a worker fetches it
once, not with each call.
"""

import bisect
import dataclasses
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import ray
import ray.exceptions
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.cluster.joining import Job
from ray_fed.files.opening import describe_executor
from ray_fed.language.structs import Plain
from ray_fed.plan.diagnostics import Note
from ray_fed.plan.fingerprint import WorkerDescription
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import stored
from ray_fed.values.client_references import ClientRun, ClientSource, HeldSource
from ray_fed.values.stacked_members import StackedMembers
from ray_fed.values.stored import Stored, StoredClients, StoredComponents

_CHUNK_BYTES = 64 * 2**20
"""Values of clients that are one object: a worker brings whole objects to its node."""

_FETCH_TIMEOUT_S = 300.0

_stored: weakref.WeakKeyDictionary[ClientSource, tuple[Job, ClientSource]]
_stored = weakref.WeakKeyDictionary()
"""Of each source the job and what stands for it in that job's object store."""


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
    except Exception as error:  # noqa: BLE001 (of any class that is pickled)
        shown = "ids" if source.function is None else errors.describe(source.function)
        cause = error.__cause__ or error  # without Ray's page on what it looked at
        reason = error_texts.message_of(cause)
        raise errors.UnsupportedError(
            "Expected clients whose ids and function can be pickled, to travel to"
            f" workers, found `{shown}`: {reason}. Make what cannot be pickled, such as"
            " a lock, an open file or a `tf.function` that was called, inside of the"
            " function."
        ) from cause


def _chunks(values: Sequence[Plain]) -> Iterator[tuple[int, list[Plain]]]:
    """Yield runs of values of bounded size, each with its first position."""
    chunk: list[Plain] = []
    num_bytes = 0
    for position, value in enumerate(values):
        size = stored.count_bytes(value)
        if chunk and num_bytes + size > _CHUNK_BYTES:
            yield position - len(chunk), chunk
            chunk, num_bytes = [], 0
        chunk.append(value)
        num_bytes += size
    yield len(values) - len(chunk), chunk


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


LARGE_KERNEL_BYTES = 256 * 1024
"""Smaller ones, with what they were fused of, travel with each call: what is in the
object store stays there as long as the driver has the kernel."""


@dataclasses.dataclass(frozen=True)
class StoredKernel:
    """Stands in a plan for its kernel.

    Attributes:
        reference: to the kernel.
    """

    reference: Any


_stored_kernels: weakref.WeakKeyDictionary[
    plans.Kernel, tuple[Job, StoredKernel, dict[bytes, Any]]
] = weakref.WeakKeyDictionary()
"""For as long as this process holds the kernel: the job, what stands for it in that
job's object store, and references to serialised computations that it was fused of."""


def is_large(kernel: plans.Kernel, computation: bytes) -> bool:
    """Return whether a kernel and what it was fused of are to be stored."""
    functions = (kernel.server, kernel.work, kernel.accumulate, computation)
    return sum(map(len, functions)) >= LARGE_KERNEL_BYTES


def store_kernel(kernel: plans.Kernel, computation: bytes) -> tuple[StoredKernel, Any]:
    """Return what stands for a kernel, and a reference to what it was fused of.

    Each is put the first time.

    Args:
        kernel: to run.
        computation: serialised; what the interpreter would run instead.
    """
    job = Job.current()
    entry = _stored_kernels.get(kernel)
    if entry is None or entry[0] != job:
        entry = _stored_kernels[kernel] = (job, StoredKernel(ray.put(kernel)), {})
    _, stored_kernel, computations = entry
    if computation not in computations:
        computations[computation] = ray.put(computation)
    return stored_kernel, computations[computation]


INLINE_BYTES = 64 * 1024
"""Smaller values travel inside of a call: a trip to the object store costs more."""

_REFERENCES_TOGETHER = 256
"""In one argument of a task; Ray keeps arguments up to 100 KB in the call itself."""


def encode(value: Any) -> Any:
    """Return a plain value as it is returned and stored.

    A small one is bytes, which Ray passes on as they are: its own pickler takes longer
    than all else that is done with a small value on its way. Bytes in a store are
    always such ones. Clients' values that are alike are stacked.
    """
    is_small = isinstance(value, bytes) or stored.count_bytes(value) < INLINE_BYTES
    if isinstance(value, list):
        value = StackedMembers.of(value) or value
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if is_small else value


def decode(encoded: Any) -> Any:
    """Return the plain value that `encode` was given."""
    value = pickle.loads(encoded) if isinstance(encoded, bytes) else encoded
    return value.members() if isinstance(value, StackedMembers) else value


def pack_result(
    evaluated: Evaluated, noted: Sequence[Note], by: WorkerDescription
) -> list[Any]:
    """Return what a plan came to, to travel: a list, which Ray takes apart itself."""
    encoded = list(map(encode, evaluated.values))
    head = dataclasses.replace(evaluated, values=list(map(stored.count_bytes, encoded)))
    return [pickle.dumps((head, noted, by)), *encoded]


def unpack_result(
    packed: Sequence[Any],
) -> tuple[Evaluated, Sequence[Note], WorkerDescription]:
    """Return what `pack_result` packed.

    Args:
        packed: the list; or its first element, and references to the others.

    Returns:
        What the plan came to, whose values stay encoded, or are `Stored`; then what was
        noted, and the worker.
    """
    head, *values = packed
    evaluated, noted, by = pickle.loads(head)
    if values and isinstance(values[0], ray.ObjectRef):
        values = list(map(Stored, values, evaluated.values))
    return dataclasses.replace(evaluated, values=values), noted, by


def store(value: Any) -> tuple[Any, int]:
    """Put a large plain value into the object store; pass a small one on.

    Clients become a run that is sliced without being read. Clients by reference stay
    so; their source is put once, for as long as it lives. What is stored stays.

    Returns:
        What stands for the value, and the bytes of its arrays: those of a source count
        when it is put.
    """
    if isinstance(value, ClientRun):
        source, num_bytes = _stand_in(value.source)
        return dataclasses.replace(value, source=source, weights=None), num_bytes
    num_bytes = stored.count_bytes(value)
    if num_bytes < INLINE_BYTES or isinstance(value, Stored):
        return value, num_bytes
    reference = ray.put(encode(value))
    if isinstance(value, list):
        count = len(cast("list[Any]", value))
        return StoredClients(reference, 0, count), num_bytes
    return Stored(reference, num_bytes), num_bytes


_Replace: TypeAlias = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Packed:
    """A plan and its argument, to travel; references beside.

    Pickled once, for all processes on its way, by pickle itself: nothing in it needs
    Ray's own pickler, which takes several times as long.

    Attributes:
        work: pickled.
        values: references of what is stored, which a worker gets resolved.
        sources: those of sources of clients and of kernels, which a worker resolves
            once.
    """

    work: bytes
    values: list[Any]
    sources: list[Any]


def pack(comp: Any, argument: Any) -> Packed:
    """Pickle a plan and its argument, without references.

    Ray stores an argument of more than 100 KB as an object. Where that holds references
    and the task may be repeated, what they name is never freed: seen with Ray 2.60,
    2026-11-21. Short lists of references stay in the call.

    Args:
        comp: the plan.
        argument: plain, structures as tuples; parts of it may be stored.
    """
    values: dict[Any, int] = {}  # the place that stands for each reference
    sources: dict[Any, int] = {}

    def take(reference: Any) -> int:
        return values.setdefault(reference, len(values))

    def take_source(reference: Any) -> int:
        return sources.setdefault(reference, len(sources))

    bare = _Replacing(take, take_source).inside(argument)
    comp = _replace_kernel(comp, take_source)
    work = pickle.dumps((comp, bare), pickle.HIGHEST_PROTOCOL)
    return Packed(work, list(values), list(sources))


def unpack(packed: Packed) -> tuple[Any, Any]:
    """Return a plan and its argument, references in their places."""
    return _unpack(packed.work, packed.values, packed.sources)


def unpack_resolved(
    work: bytes, resolved: Sequence[Any], sources: Sequence[Any]
) -> tuple[Any, Any]:
    """Return a plan and its argument, values in the places of their references.

    Args:
        work: see `Packed`.
        resolved: what its references name, encoded.
        sources: references still.
    """
    comp, argument = _unpack(work, resolved, sources)
    return comp, _unstored(argument)


def _unpack(
    work: bytes, values: Sequence[Any], sources: Sequence[Any]
) -> tuple[Any, Any]:
    comp, bare = pickle.loads(work)
    put, put_source = values.__getitem__, sources.__getitem__
    return _replace_kernel(comp, put_source), _Replacing(put, put_source).inside(bare)


def short_lists(references: Sequence[Any]) -> list[list[Any]]:
    """Return references in lists that are short enough to stay in a call."""
    starts = range(0, len(references), _REFERENCES_TOGETHER)
    return [list(references[start : start + _REFERENCES_TOGETHER]) for start in starts]


def gathered(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the references of short lists."""
    return [reference for together in lists for reference in together]


def _unstored(value: Any) -> Any:
    match value:
        case Stored():
            return decode(value.reference)
        case StoredClients() if value.reference is not None:
            return decode(value.reference)[value.start : value.stop]
        case StoredComponents():
            return StoredComponents(tuple(map(_unstored, value.components)))
        case tuple():
            return tuple(map(_unstored, cast("tuple[Any, ...]", value)))
        case _:
            return value


@dataclasses.dataclass(frozen=True)
class _Replacing:
    """Puts other references into an argument.

    No function inside of a function: one that calls itself is a cycle, and what it
    holds is freed late.

    Attributes:
        reference: from a reference to what takes its place.
        source: the same for that of a source of clients.
        parts: those met, by identity, by which an executor knows them.
    """

    reference: _Replace
    source: _Replace
    components: dict[int, StoredComponents] = dataclasses.field(
        default_factory=dict[int, StoredComponents]
    )

    def inside(self, value: Any) -> Any:
        """Return a value with other references; lists of clients hold none."""
        match value:
            case Stored():
                value = Stored(self.reference(value.reference), value.num_bytes)
            case StoredClients():
                reference = self.reference(value.reference)
                value = StoredClients(reference, value.start, value.stop)
            case ClientRun():
                former = cast("StoredSource", value.source)
                about = (former.token, former.is_resident)
                source = StoredSource(*about, self.source(former.reference))
                value = dataclasses.replace(value, source=source)
            case StoredComponents():
                if id(value) not in self.components:
                    replaced = tuple(map(self.inside, value.components))
                    self.components[id(value)] = StoredComponents(replaced)
                value = self.components[id(value)]
            case tuple():
                value = tuple(map(self.inside, cast("tuple[Any, ...]", value)))
            case _:
                pass
        return value


def _replace_kernel(comp: Any, fn: _Replace) -> Any:
    kernel = getattr(comp, "kernel", None)
    if not isinstance(kernel, StoredKernel):
        return comp
    return dataclasses.replace(comp, kernel=StoredKernel(fn(kernel.reference)))
