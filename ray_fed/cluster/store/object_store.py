"""Values that many calls take: put into the object store once, passed by reference."""

import dataclasses
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import ray

from ray_fed.cluster.store.stored_kernels import StoredKernel
from ray_fed.cluster.store.stored_sources import StoredSource, store_run
from ray_fed.plan.diagnostics import Note
from ray_fed.plan.outcomes import Evaluated
from ray_fed.values import stored
from ray_fed.values.client_references import ClientRun
from ray_fed.values.stacked_members import StackedMembers
from ray_fed.values.stored import Stored, StoredClients, StoredComponents

_INLINE_BYTES = 64 * 1024
"""Smaller values travel inside of a call: a trip to the object store costs more."""

_REFERENCES_TOGETHER = 256
"""In one argument of a task; Ray keeps arguments up to 100 KB in the call itself."""


def encode(value: Any) -> Any:
    """Return a plain value as it is returned and stored.

    A small one is bytes, which Ray passes on as they are: its own pickler takes longer
    than all else that is done with a small value on its way. Bytes in a store are
    always such ones. Clients' values that are alike are stacked.
    """
    is_small = isinstance(value, bytes) or stored.count_bytes(value) < _INLINE_BYTES
    if isinstance(value, list):
        value = StackedMembers.of(value) or value
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if is_small else value


def decode(held: Any) -> Any:
    """Return the plain value that `encode` was given."""
    found = pickle.loads(held) if isinstance(held, bytes) else held
    return found.members() if isinstance(found, StackedMembers) else found


def pack_result(evaluated: Evaluated, noted: Sequence[Note]) -> list[Any]:
    """Return what a plan came to, to travel: a list, which Ray takes apart itself."""
    head = dataclasses.replace(evaluated, values=[])
    return [pickle.dumps((head, noted)), *map(encode, evaluated.values)]


def unpack_result(packed: Sequence[Any]) -> tuple[Evaluated, Sequence[Note]]:
    """Return what `pack_result` packed; values stay encoded."""
    head, *encoded = packed
    evaluated, noted = pickle.loads(head)
    return dataclasses.replace(evaluated, values=encoded), noted


def store(value: Any) -> tuple[Any, int]:
    """Put a large plain value into the object store; pass a small one on.

    Clients become a run that is sliced without being read. Clients by reference stay
    so; their source is put once, for as long as it lives. What is stored stays.

    Returns:
        What stands for the value, and the bytes of its arrays: those of a source count
        when it is put.
    """
    if isinstance(value, ClientRun):
        return store_run(value)
    num_bytes = stored.count_bytes(value)
    if num_bytes < _INLINE_BYTES or isinstance(value, Stored):
        return value, num_bytes
    reference = ray.put(encode(value))
    if isinstance(value, list):
        count = len(cast("list[Any]", value))
        return StoredClients(reference, 0, count), num_bytes
    return Stored(reference, num_bytes), num_bytes


_Replace: TypeAlias = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Stands for a reference that travels beside an argument."""

    index: int


@dataclasses.dataclass(frozen=True)
class _SourceSlot:
    """Stands for that of a source of clients, or of a kernel."""

    index: int


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
    found: dict[Any, _Slot] = {}
    sources: dict[Any, _SourceSlot] = {}

    def take(reference: Any) -> _Slot:
        return found.setdefault(reference, _Slot(len(found)))

    def take_source(reference: Any) -> _SourceSlot:
        return sources.setdefault(reference, _SourceSlot(len(sources)))

    bare = _Replacing(take, take_source).inside(argument)
    comp = _replace_kernel(comp, take_source)
    work = pickle.dumps((comp, bare), pickle.HIGHEST_PROTOCOL)
    return Packed(work, list(found), list(sources))


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
    work: bytes, held: Sequence[Any], sources: Sequence[Any]
) -> tuple[Any, Any]:
    comp, bare = pickle.loads(work)

    def put(slot: _Slot) -> Any:
        return held[slot.index]

    def put_source(slot: _SourceSlot) -> Any:
        return sources[slot.index]

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
                value = _replace_source(value, self.source)
            case StoredComponents():
                if id(value) not in self.components:
                    held = tuple(map(self.inside, value.components))
                    self.components[id(value)] = StoredComponents(held)
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


def _replace_source(run: ClientRun, fn: _Replace) -> ClientRun:
    source = cast("StoredSource", run.source)
    found = StoredSource(source.token, source.is_resident, fn(source.reference))
    return dataclasses.replace(run, source=found)
