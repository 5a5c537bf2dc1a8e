"""Stores large objects once in Ray's object store, and packs plans that refer to them.

The driver stores four kinds of objects: values, client sources (objects that read the
clients' data), functions of plans, and frozen arrays (large constants that were cut out
of computations). A plan carries references. A process fetches an object when it needs
the object first. A worker caches a plan's functions, and fetches them once.
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
"""Maximum bytes of clients' values in one object, unless one value alone is larger. Ray
copies whole objects to a worker's node."""

_FETCH_TIMEOUT_S = 300.0

_stored: weakref.WeakKeyDictionary[ClientSource, tuple[Job, ClientSource]]
_stored = weakref.WeakKeyDictionary()
"""For each client source: the job of Ray, and the `StoredSource` in the job's store."""


def _stand_in(source: ClientSource) -> tuple[ClientSource, int]:
    # Returns the stored form of a source, and the number of bytes that the call stored.
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
    # A source of another Ray raises ContextStateError when it is pickled.
    try:
        return ray.put(source)
    except (ray.exceptions.RayError, errors.ContextStateError):
        raise
    except Exception as error:  # noqa: BLE001 (pickling may raise any class)
        shown = "ids" if source.function is None else errors.describe(source.function)
        cause = error.__cause__ or error  # Ray adds a page about what it inspected
        reason = error_texts.message_of(cause)
        raise errors.UnsupportedError(
            "Expected clients whose ids and function can be pickled and sent to"
            f" workers, found `{shown}`: {reason}. Create objects that cannot be"
            " pickled inside of the function, for example locks, open files, and each"
            " `tf.function` that is called."
        ) from cause


def _chunks(values: Sequence[Plain]) -> Iterator[tuple[int, list[Plain]]]:
    """Yield neighboring values of bounded bytes, with the position of the first."""
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
    """Return the object of a reference. This blocks the thread for up to 300 s."""
    # A worker has one thread for work, which can only wait meanwhile.
    return ray.get(reference, timeout=_FETCH_TIMEOUT_S)  # noqa: TID251


class StoredSource(ClientSource):
    """A client source in the object store. Each process fetches it on the first read.

    `token` and `is_resident` are the original source's, see `ClientSource`.
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
    """Return an error that names the code that this process lacks to unpickle a source.

    If unpickling failed for another reason, return `error` itself.
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
        f"Expected {missing}, which defines the clients' function or ids, found it"
        f" missing in {error_texts.describe_process()}: install it on every machine,"
        ' send it with the job by `Config(runtime_env={"working_dir": "."})` or by'
        ' "py_modules", or define the function in the program itself.'
    )


class _ChunkedSource(ClientSource):
    """A client source whose values are in several objects of the object store."""

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
"""Minimum total bytes of a plan's functions to store them. They stay stored for as long
as the driver has the plan's kernel. Smaller functions travel with each call. Ray would
store an argument of 100 KB again for each call, and workers would read it again."""

_FETCHED = 48
"""Number of fetched objects with plan functions that one process caches."""

_fetched: LruCache[bytes, Any] = LruCache(_FETCHED)


def fetch_once(reference: Any) -> Any:
    """Return the object of a reference, from this process's cache if possible."""
    return _fetched.get(reference.binary(), lambda: fetch(reference))


@dataclasses.dataclass(frozen=True)
class StoredKernel:
    """References that replace the kernel and the other functions in a plan.

    A kernel is the TensorFlow graph that does the work of many clients. A process may
    cache the fetched objects, but not these references, because a reference in an idle
    process would keep its object in the store.

    Attributes:
        kernel: Reference to the `plans.Kernel`.
        computation: Reference to the serialized computation. Only workers that
            interpret the plan without its kernel read it.
        others: Reference to a pair: the merge function, and a mapping from names to the
            functions of the round's end (`plans.Finish`).
    """

    kernel: Any
    computation: Any
    others: Any


_stored_kernels: weakref.WeakKeyDictionary[
    plans.Kernel, tuple[Job, dict[object, Any]]
] = weakref.WeakKeyDictionary()
"""For each kernel of this process: the job, and the references of the job by key. The
key None has the kernel's reference. The other keys are the serialized computations, and
the tuples of other functions, of plans with this kernel."""


def store_functions(comp: plans.Subround) -> plans.Subround:
    """Return the plan with references in place of its functions, if these are large.

    The first call for a function puts the function into the object store.
    `restore_functions` is the inverse.
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
    """Fetch the functions that `store_functions` replaced, and return the whole plan.

    Only `computation` is not fetched, because few workers need it. It becomes a list
    with its reference, for `read_computation`. Other plans are returned as they are.
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
    """Return a plan's serialized computation, also if `store_functions` stored it."""
    stored_kernel: object = comp.kernel
    if not isinstance(stored_kernel, StoredKernel):
        return comp.computation
    return fetch_once(stored_kernel.computation)


def read_computation(computation: bytes | list[Any]) -> bytes:
    """Return a serialized computation. If a list has its reference, fetch it."""
    return fetch_once(computation[0]) if isinstance(computation, list) else computation


_stored_arrays: weakref.WeakKeyDictionary[FrozenArray, tuple[Job, Any]]
_stored_arrays = weakref.WeakKeyDictionary()
"""For each frozen array that this process stored: the job, and the reference."""


def store_arrays(*computations: bytes | None) -> tuple[tuple[str, Any], ...]:
    """Store the frozen arrays of serialized computations, each array once.

    The result has the name of each array and the reference to it. Raises
    ContextStateError if this process does not have one of the arrays.
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
    """Fetch the arrays that `store_arrays` stored, without a copy.

    Graphs of this process find an array by its name for as long as the result, or
    another graph with the array, is alive.
    """
    return [
        frozen_arrays.find(name) or frozen_arrays.add(name, fetch(reference))
        for name, reference in arrays
    ]


INLINE_BYTES = 64 * 1024
"""Values with fewer bytes travel inside a call. The object store would take longer."""

_REFERENCES_TOGETHER = 256
"""Maximum number of references in one argument of a task. The argument is then below
100 KB, so Ray keeps it in the call itself."""


def encode(value: Any) -> Any:
    """Encode a plain value (NumPy arrays in tuples and lists) for a call or the store.

    A small value is pickled to bytes here, because Ray's own pickler is slow, and Ray
    sends bytes as they are. Bytes are always pickled, so encoded bytes are always a
    pickle. A list of clients' values of equal shapes becomes a `StackedMembers`.
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

    The first element has everything except the values. Each other element is one
    encoded value. `noted` are the notes for the user, and `by` describes the worker.
    """
    encoded = list(map(encode, evaluated.values))
    head = dataclasses.replace(evaluated, values=list(map(stored.count_bytes, encoded)))
    return [pickle.dumps((head, noted, by)), *encoded]


def unpack_result(
    packed: Sequence[Any],
) -> tuple[Evaluated, Sequence[Note], WorkerDescription]:
    """Return the outcome, the notes and the worker from a list of `pack_result`.

    The values of the outcome stay encoded. If `packed` has references in place of
    values, the outcome has `Stored` objects with these references.
    """
    head, *values = packed
    evaluated, noted, by = pickle.loads(head)
    if values and isinstance(values[0], ray.ObjectRef):
        values = list(map(Stored, values, evaluated.values))
    return dataclasses.replace(evaluated, values=values), noted, by


def store(value: Any) -> tuple[Any, int]:
    """Put a large plain value into the object store, and return its stand-in.

    A large value becomes a `Stored`. A large list of clients' values becomes a
    `StoredClients`, which can be sliced without reading it. A `ClientRun` (clients of a
    source by position) becomes one whose source is stored. A small value stays as it
    is.

    The second result is the number of bytes of the value. The bytes of a source count
    only in the call that stores it.
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
        work: The pickled plan and argument. They have indices in place of references.
        values: References to stored values. They are arguments of the worker's method,
            so Ray replaces them by the values.
        sources: References to client sources, kernels and frozen arrays. They are in
            lists, so Ray does not replace them. A worker fetches each object once.
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
    """Return the plan and argument of `pack`, with their references."""
    return _unpack(packed.work, packed.values, packed.sources)


def unpack_resolved(
    work: bytes, resolved: Sequence[Any], sources: Sequence[Any]
) -> tuple[Any, Any]:
    """Return the plan and argument of `pack`, with values in place of value references.

    `work` is `Packed.work`. `resolved` has the encoded values of `Packed.values`, and
    `sources` has the references of `Packed.sources`, which stay references.
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
    """Join lists of references that `short_lists` returned into one list."""
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
    """Applies functions to the references in an argument.

    This is a class because a recursive nested function is a reference cycle, which
    would free the references late.

    Attributes:
        reference: Function for references to values.
        source: Function for references to client sources.
        components: Result for each `StoredComponents` by its id. Executors recognize
            components by identity, so one object must not become two.
    """

    reference: _Replace
    source: _Replace
    components: dict[int, StoredComponents] = dataclasses.field(
        default_factory=dict[int, StoredComponents]
    )

    def inside(self, value: Any) -> Any:
        """Return the value with its references replaced. Lists contain none."""
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
    arrays = getattr(comp, "arrays", ())
    if arrays:
        replaced = tuple((name, fn(reference)) for name, reference in arrays)
        comp = dataclasses.replace(comp, arrays=replaced)
    kernel = getattr(comp, "kernel", None)
    if not isinstance(kernel, StoredKernel):
        return comp
    references = kernel.kernel, kernel.computation, kernel.others
    return dataclasses.replace(comp, kernel=StoredKernel(*map(fn, references)))
