"""Stores values, client sources, functions of plans and frozen arrays in Ray's store.

The driver puts each object once, and plans carry references. Each process that reads an
object fetches it. A worker fetches the functions of a plan once, not with each call.
"""

import bisect
import dataclasses
import itertools
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
from ray_fed.language.structs import Plain
from ray_fed.plan.diagnostics import Note
from ray_fed.plan.fingerprint import WorkerDescription
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import frozen_arrays, stored
from ray_fed.values.client_references import ClientRun, ClientSource, HeldSource
from ray_fed.values.frozen_arrays import FrozenArray
from ray_fed.values.lru_cache import LruCache
from ray_fed.values.stacked_members import StackedMembers
from ray_fed.values.stored import Stored, StoredClients, StoredComponents

_CHUNK_BYTES = 64 * 2**20
"""Most bytes of clients' values in one object, unless one value alone is larger. Ray
copies whole objects to a worker's node."""

_FETCH_TIMEOUT_S = 300.0

_stored: weakref.WeakKeyDictionary[ClientSource, tuple[Job, ClientSource]]
_stored = weakref.WeakKeyDictionary()
"""For each source, the job and the source's `StoredSource` in that job's store."""


def _stand_in(source: ClientSource) -> tuple[ClientSource, int]:
    """Return the stored form of a source, and the bytes that this call stored."""
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
    """Put a source into the object store, and return the reference.

    Raises UnsupportedError if the user's function or an id cannot be pickled, and
    ContextStateError if the source refers to objects of a Ray that was shut down.
    """
    try:
        return ray.put(source)
    except (ray.exceptions.RayError, errors.ContextStateError):
        raise
    except Exception as error:  # noqa: BLE001 (pickling may raise any class)
        shown = "ids" if source.function is None else errors.describe(source.function)
        cause = error.__cause__ or error  # Ray adds a page about what it inspected
        reason = error_texts.message_of(cause)
        raise errors.UnsupportedError(
            "Expected clients whose ids and function can be pickled, to travel to"
            f" workers, found `{shown}`: {reason}. Make what cannot be pickled, such as"
            " a lock, an open file or a `tf.function` that was called, inside of the"
            " function."
        ) from cause


def _chunks(values: Sequence[Plain]) -> Iterator[tuple[int, list[Plain]]]:
    """Yield runs of values, each with its first position and of bounded bytes."""
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
    """Fetch an object. The calling thread waits for it for up to 300 seconds."""
    # A worker's only working thread has nothing else to do meanwhile.
    return ray.get(reference, timeout=_FETCH_TIMEOUT_S)  # noqa: TID251


class StoredSource(ClientSource):
    """A client source in the object store.

    Each process fetches it on the first read.
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
    """Return an error that names the code which a worker lacks to read a source.

    If reading failed for another reason, return `error` itself.
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
        f" found it missing in {error_texts.describe_process()}: install it on every"
        " machine, send it with the job by"
        ' `Config(runtime_env={"working_dir": "."})` or by "py_modules", or define the'
        " function in the program itself."
    )


class _ChunkedSource(ClientSource):
    """Values of clients in several objects. Arrays are read without a copy."""

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


LARGE_PLAN_BYTES = 32 * 1024
"""Functions of a plan with fewer bytes in all travel with each call. Larger ones are
stored for as long as the driver has the plan's kernel. Otherwise Ray would store an
argument of 100 KB again for each call, and workers would read it again."""

_FETCHED = 48
"""Number of fetched objects with functions of plans that one process keeps."""

_fetched: LruCache[bytes, Any] = LruCache(_FETCHED)


def fetch_once(reference: Any) -> Any:
    """Return an object from this process's cache, or fetch and cache it."""
    return _fetched.get(reference.binary(), lambda: fetch(reference))


@dataclasses.dataclass(frozen=True)
class StoredKernel:
    """References that replace the kernel and the other functions in a plan.

    A process may cache the fetched objects, but not these references. In an idle
    process, the references would keep the objects in the store.

    Attributes:
        computation: Reference to the serialized computation, which only the interpreter
            needs.
        others: Reference to a pair: the merge, and the functions of the finish by name.
    """

    kernel: Any
    computation: Any
    others: Any


_stored_kernels: weakref.WeakKeyDictionary[
    plans.Kernel, tuple[Job, dict[object, Any]]
] = weakref.WeakKeyDictionary()
"""For each kernel that this process holds: the job, and the references of that job. The
key None has the reference to the kernel. The other keys are serialized computations and
the other functions of plans with this kernel."""


def store_functions(comp: plans.Subround) -> plans.Subround:
    """Return a plan with references in place of its functions, if these are large.

    The first call for a function puts it into the object store.
    """
    kernel, finish = comp.kernel, comp.finish
    if not isinstance(kernel, plans.Kernel):
        return comp  # interpreted, or the functions are stored already
    of_finish: dict[str, Any] = {}
    if finish is not None:
        names = ("merge", "partial_type", "computation")
        of_finish = {name: getattr(finish, name) for name in names}
    others = (comp.merge, *of_finish.values())
    functions = (kernel.server, kernel.work, kernel.accumulate, comp.computation)
    if sum(len(each or b"") for each in (*functions, *others)) < LARGE_PLAN_BYTES:
        return comp
    job = Job.current()
    entry = _stored_kernels.get(kernel)
    if entry is None or entry[0] != job:
        entry = _stored_kernels[kernel] = (job, {None: ray.put(kernel)})
    references = entry[1]
    if comp.computation not in references:
        references[comp.computation] = ray.put(comp.computation)
    if others not in references:
        references[others] = ray.put((comp.merge, of_finish))
    if finish is not None:
        nothing = dict.fromkeys(of_finish)
        finish = dataclasses.replace(finish, **nothing)
    stored_kernel = StoredKernel(
        references[None], references[comp.computation], references[others]
    )
    return dataclasses.replace(
        comp, computation=b"", merge=None, kernel=stored_kernel, finish=finish
    )


def restore_functions(comp: Any) -> Any:
    """Return a plan with the functions that `store_functions` replaced.

    `computation` becomes a list with its reference, for `read_computation`.
    """
    stored_kernel = getattr(comp, "kernel", None)
    if not isinstance(stored_kernel, StoredKernel):
        return comp
    merge, of_finish = fetch_once(stored_kernel.others)
    return dataclasses.replace(
        comp,
        computation=[stored_kernel.computation],
        merge=merge,
        kernel=fetch_once(stored_kernel.kernel),
        finish=comp.finish and dataclasses.replace(comp.finish, **of_finish),
    )


def fetch_computation(comp: plans.Subround) -> bytes:
    """Return the serialized computation of a plan."""
    stored_kernel: object = comp.kernel
    if not isinstance(stored_kernel, StoredKernel):
        return comp.computation
    return fetch_once(stored_kernel.computation)


def read_computation(computation: bytes | list[Any]) -> bytes:
    """Return a serialized computation. If a list has its reference, fetch it."""
    return fetch_once(computation[0]) if isinstance(computation, list) else computation


_stored_arrays: weakref.WeakKeyDictionary[FrozenArray, tuple[Job, Any]]
_stored_arrays = weakref.WeakKeyDictionary()
"""For each frozen array that this process stored, the job and the reference."""


def store_arrays(*computations: bytes | None) -> tuple[tuple[str, Any], ...]:
    """Return the names of serialized computations' frozen arrays, with references.

    The first call for an array puts it into the object store.

    Raises:
        ContextStateError: This process does not have one of the arrays.
    """
    references: dict[str, Any] = {}
    for name in itertools.chain(
        *map(frozen_arrays.names_in, filter(None, computations))
    ):
        array, job = frozen_arrays.get(name), Job.current()
        if array not in _stored_arrays or _stored_arrays[array][0] != job:
            _stored_arrays[array] = job, ray.put(array.content)
        references[name] = _stored_arrays[array][1]
    return tuple(references.items())


def fetch_arrays(arrays: Iterable[tuple[str, Any]]) -> list[FrozenArray]:
    """Add stored arrays to the table of this process, without a copy.

    They stay there while the result, or a graph that uses them, is referenced.
    """
    return [
        frozen_arrays.find(name) or frozen_arrays.add(name, fetch(reference))
        for name, reference in arrays
    ]


INLINE_BYTES = 64 * 1024
"""Values with fewer bytes travel inside a call. The object store would take longer."""

_REFERENCES_TOGETHER = 256
"""Most references in one argument of a task. Ray keeps an argument of up to 100 KB in
the call itself."""


def encode(value: Any) -> Any:
    """Encode a plain value to be returned or stored.

    Ray passes bytes on unchanged, so a small value is pickled here; Ray's own pickler
    is slow. Bytes are pickled too, so stored bytes are always a pickle. A list of alike
    clients' values becomes a `StackedMembers`.
    """
    is_small = isinstance(value, bytes) or stored.count_bytes(value) < INLINE_BYTES
    if isinstance(value, list):
        value = StackedMembers.of(value) or value
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if is_small else value


def decode(encoded: Any) -> Any:
    """Return the plain value from which `encode` made `encoded`."""
    value = pickle.loads(encoded) if isinstance(encoded, bytes) else encoded
    return value.members() if isinstance(value, StackedMembers) else value


def pack_result(
    evaluated: Evaluated, noted: Sequence[Note], by: WorkerDescription
) -> list[Any]:
    """Pack the outcome of a plan into a list, which Ray can return as several objects.

    The first element is everything but the values. The others are encoded values.
    """
    encoded = list(map(encode, evaluated.values))
    head = dataclasses.replace(evaluated, values=list(map(stored.count_bytes, encoded)))
    return [pickle.dumps((head, noted, by)), *encoded]


def unpack_result(
    packed: Sequence[Any],
) -> tuple[Evaluated, Sequence[Note], WorkerDescription]:
    """Unpack the list of `pack_result`.

    After the first element, `packed` may have references to values. The outcome then
    has `Stored` values, and otherwise encoded ones.
    """
    head, *values = packed
    evaluated, noted, by = pickle.loads(head)
    if values and isinstance(values[0], ray.ObjectRef):
        values = list(map(Stored, values, evaluated.values))
    return dataclasses.replace(evaluated, values=values), noted, by


def store(value: Any) -> tuple[Any, int]:
    """Put a large plain value into the object store.

    A small value stays as it is.

    A large list of clients' values becomes a `StoredClients`, which can be sliced
    without reading it. A `ClientRun` keeps its positions, and its source is stored
    once. The second result is the bytes of the value's arrays. The bytes of a source
    count only in the call that stores it.
    """
    if isinstance(value, ClientRun):
        source, num_bytes = _stand_in(value.source)
        about = (value.type_signature, value.positions)
        return ClientRun(source, *about), num_bytes
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
    """A pickled plan and argument, with Ray's references in separate lists.

    Python's `pickle` runs once, for all processes that pass the plan on. Ray's own
    pickler takes several times as long.

    Attributes:
        work: The pickled plan and argument. Indices stand for references.
        values: References to stored values. Ray resolves them when it calls a worker.
        sources: References to client sources, kernels and frozen arrays. A worker
            fetches each once.
    """

    work: bytes
    values: list[Any]
    sources: list[Any]


def pack(comp: Any, argument: Any) -> Packed:
    """Pickle a plan and its argument, and list their references separately.

    Ray stores an argument of more than 100 KB as an object. If this object holds
    references and the task may be repeated, Ray never frees the objects that they name
    (seen with Ray 2.60, 2026-11-21). Short lists of references stay in the call.
    """
    values: dict[Any, int] = {}  # the index that stands for each reference
    sources: dict[Any, int] = {}

    def take(reference: Any) -> int:
        return values.setdefault(reference, len(values))

    def take_source(reference: Any) -> int:
        return sources.setdefault(reference, len(sources))

    bare = _Replacing(take, take_source).inside(argument)
    comp = _replace_in_plan(comp, take_source)
    work = pickle.dumps((comp, bare), pickle.HIGHEST_PROTOCOL)
    return Packed(work, list(values), list(sources))


def unpack(packed: Packed) -> tuple[Any, Any]:
    """Return the plan and its argument, with references in their places."""
    return _unpack(packed.work, packed.values, packed.sources)


def unpack_resolved(
    work: bytes, resolved: Sequence[Any], sources: Sequence[Any]
) -> tuple[Any, Any]:
    """Return the plan and its argument, with values in the places of references.

    `resolved` has the encoded values of `Packed.values`.
    """
    comp, argument = _unpack(work, resolved, sources)
    return comp, _unstored(argument)


def _unpack(
    work: bytes, values: Sequence[Any], sources: Sequence[Any]
) -> tuple[Any, Any]:
    comp, bare = pickle.loads(work)
    put, put_source = values.__getitem__, sources.__getitem__
    return _replace_in_plan(comp, put_source), _Replacing(put, put_source).inside(bare)


def short_lists(references: Sequence[Any]) -> list[list[Any]]:
    """Split references into lists that are short enough to stay in a call."""
    starts = range(0, len(references), _REFERENCES_TOGETHER)
    return [list(references[start : start + _REFERENCES_TOGETHER]) for start in starts]


def gathered(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """Join the lists of `short_lists`."""
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
    """Replaces the references in an argument.

    This is a class because a recursive nested function is a reference cycle, which
    would free its references late. Equal ids in `components` get the same object,
    because an executor recognizes components by identity.
    """

    reference: _Replace
    source: _Replace
    components: dict[int, StoredComponents] = dataclasses.field(
        default_factory=dict[int, StoredComponents]
    )

    def inside(self, value: Any) -> Any:
        """Return the value with its references replaced. Lists have no references."""
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


def _replace_in_plan(comp: Any, fn: _Replace) -> Any:
    """Return a plan with the references to its kernel and arrays replaced."""
    arrays = getattr(comp, "arrays", ())
    if arrays:
        replaced = tuple((name, fn(reference)) for name, reference in arrays)
        comp = dataclasses.replace(comp, arrays=replaced)
    kernel = getattr(comp, "kernel", None)
    if not isinstance(kernel, StoredKernel):
        return comp
    references = kernel.kernel, kernel.computation, kernel.others
    return dataclasses.replace(comp, kernel=StoredKernel(*map(fn, references)))
