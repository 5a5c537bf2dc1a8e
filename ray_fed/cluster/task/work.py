"""A plan with its argument and terms, packed to travel to the task that drives it."""

import dataclasses
import functools
import pickle
from typing import Any, cast

import federated_language as fl

import ray_fed.plan.plans as plans
from ray_fed.cluster.store import object_store, stored_kernels
from ray_fed.cluster.store.stored_kernels import StoredKernel
from ray_fed.cluster.store.stored_sources import fetch
from ray_fed.cluster.task import leases
from ray_fed.language import blocks, type_checks
from ray_fed.plan import merge_tree
from ray_fed.values import stored


@dataclasses.dataclass(frozen=True)
class Work:
    """A plan with its argument, under a name.

    Attributes:
        name: that its worker is leased under; one at a time has it.
        terms: to lease a worker with.
        packed: the plan and its argument.
        computation: of a subround with a kernel, which only the interpreter needs, and
            so no part of the plan; serialised, or in a list the reference to a large
            one.
        clients_per_leaf: of the cohort.
        num_clients: of a subround; None: a finish, which a worker runs in one call.
        is_whole: whether it is a computation that is not cut, whose one leaf may hold
            clients of several workers.
        given: the lease of that name, where the driver kept it; None: the pool is asked
            for a worker.
    """

    name: str
    terms: leases.Terms
    packed: object_store.Packed
    computation: bytes | list[Any] | None
    clients_per_leaf: int
    num_clients: int | None
    is_whole: bool = False
    given: leases.Given | None = None

    @classmethod
    def of(
        cls,
        name: str,
        terms: leases.Terms,
        comp: Any,
        arg: Any,
        given: leases.Given | None = None,
    ) -> "Work":
        """Pack a `plans.Subround` or a `plans.Finish`.

        Args:
            name: of the subround.
            terms: to lease a worker with.
            comp: the plan.
            arg: as `worker.evaluation` takes it, but for what is stored.
            given: see `Work`.
        """
        computation, num_clients, is_whole = None, None, False
        if isinstance(comp, plans.Subround):
            is_whole = not comp.chunks
            num_clients = sum(map(len, comp.leaves))
            if isinstance(comp.kernel, plans.Kernel | StoredKernel):
                computation, kernel = _stored_if_large(comp)
                comp = dataclasses.replace(comp, computation=b"", kernel=kernel)
        packed, size = object_store.pack(comp, arg), comp.clients_per_leaf
        about = (size, num_clients, is_whole, given)
        return cls(name, terms, packed, computation, *about)

    def unpack(self) -> tuple[Any, Any]:
        """Return the plan, whole, and its argument."""
        comp, arg = object_store.unpack(self.packed)
        computation = self.computation
        if isinstance(computation, list):
            computation = cast("bytes", fetch(computation[0]))
        if computation is not None:
            comp = dataclasses.replace(comp, computation=computation)
        return comp, arg

    def deal(self, num_workers: int) -> tuple[list["Work"], int]:
        """Return the parts of a subround that workers run at once, in order.

        Args:
            num_workers: that there are; each part is of whole chunks.

        Returns:
            The parts, at most one for each worker, and the number of values that are
            kept for each client.
        """
        if num_workers == 1 or self.is_whole:
            return [self], 0
        subround, arg = self.unpack()
        chunks, parameter = subround.chunks, _parameter_of(subround.computation)
        first = subround.leaves[0].start
        parts: list[Work] = []
        for run in merge_tree.cut_runs(len(chunks), num_workers):
            leaves = range(chunks[run.start].start, chunks[run.stop - 1].stop)
            part = subround.of_leaves(leaves)
            inside = range(part.leaves[0].start - first, part.leaves[-1].stop - first)
            clients = stored.slice_clients(arg, parameter, inside)
            parts.append(Work.of(self.name, self.terms, part, clients))
        return parts, subround.num_kept

    def for_worker(self) -> list[Any]:
        """Return what `LeafWorker.evaluate` takes for it."""
        sources = object_store.short_lists(self.packed.sources)
        work = self.packed.work, self.computation, len(sources)
        return [*work, *sources, *self.packed.values]

    def as_arguments(self) -> list[Any]:
        """Return what `run_plan` takes for it, which Ray pickles at little cost."""
        packed = self.packed
        sources = object_store.short_lists(packed.sources)
        lists = [*sources, *object_store.short_lists(packed.values)]
        cut = self.clients_per_leaf, self.num_clients, self.is_whole
        about = (self.name, self.terms, *cut, self.given, len(sources))
        head = pickle.dumps(about)
        return [head, packed.work, self.computation, *lists]

    @classmethod
    def from_arguments(
        cls,
        head: bytes,
        work: bytes,
        computation: bytes | list[Any] | None,
        *lists: list[Any],
    ) -> "Work":
        """Return what `as_arguments` took apart."""
        name, terms, *about, count = pickle.loads(head)
        sources, held = map(object_store.gathered, (lists[:count], lists[count:]))
        packed = object_store.Packed(work, held, sources)
        return cls(name, terms, packed, computation, *about)


@functools.lru_cache(maxsize=16)
def _parameter_of(computation: bytes) -> fl.Type | None:
    """Return the type of what a serialised computation takes."""
    block = blocks.parse_block(computation)
    return type_checks.function_type(block.type_signature).parameter


def _stored_if_large(comp: plans.Subround) -> tuple[bytes | list[Any], Any]:
    """Return the computation of a plan and its kernel: as they are, or references."""
    if not isinstance(comp.kernel, plans.Kernel):  # packed before, by the driver
        return comp.computation, comp.kernel
    if not stored_kernels.is_large(comp.kernel, comp.computation):
        return comp.computation, comp.kernel
    kernel, computation = stored_kernels.store_kernel(comp.kernel, comp.computation)
    return [computation], kernel
