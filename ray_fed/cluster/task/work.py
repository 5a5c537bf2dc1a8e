"""A plan with its argument and terms, packed to travel to the task that drives it."""

import dataclasses
import pickle
from typing import Any, cast

import ray_fed.plan.plans as plans
from ray_fed.cluster.store import object_store, stored_kernels
from ray_fed.cluster.store.stored_kernels import StoredKernel
from ray_fed.cluster.store.stored_sources import fetch
from ray_fed.cluster.task import leases


@dataclasses.dataclass(frozen=True)
class Work:
    """A plan with its argument, under a name.

    Attributes:
        name: that its worker is leased under; one at a time has it.
        terms: to lease a worker with.
        packed: the plan and its argument.
        computation: of a subround to fold, which only the interpreter needs, and so no
            part of the plan; serialised, or in a list the reference to a large one.
        clients_per_leaf: of the cohort.
        num_clients: of a subround; None: a finish, which a worker runs in one call.
        given: the lease of that name, where the driver kept it; None: the pool is asked
            for a worker.
    """

    name: str
    terms: leases.Terms
    packed: object_store.Packed
    computation: bytes | list[Any] | None
    clients_per_leaf: int
    num_clients: int | None
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
        computation, num_clients = None, None
        if isinstance(comp, plans.Subround):
            num_clients = sum(map(len, comp.leaves))
            if isinstance(comp.kernel, plans.Kernel | StoredKernel):
                computation, kernel = _stored_if_large(comp)
                comp = dataclasses.replace(comp, computation=b"", kernel=kernel)
        packed, size = object_store.pack(comp, arg), comp.clients_per_leaf
        return cls(name, terms, packed, computation, size, num_clients, given)

    def unpack(self) -> tuple[Any, Any]:
        """Return the plan, whole, and its argument."""
        comp, arg = object_store.unpack(self.packed)
        computation = self.computation
        if isinstance(computation, list):
            computation = cast("bytes", fetch(computation[0]))
        if computation is not None:
            comp = dataclasses.replace(comp, computation=computation)
        return comp, arg

    def as_arguments(self) -> list[Any]:
        """Return what `run_plan` takes for it, which Ray pickles at little cost."""
        packed = self.packed
        sources = object_store.short_lists(packed.sources)
        lists = [*sources, *object_store.short_lists(packed.values)]
        cut = self.clients_per_leaf, self.num_clients
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
        name, terms, size, num_clients, given, count = pickle.loads(head)
        sources, held = map(object_store.gathered, (lists[:count], lists[count:]))
        packed = object_store.Packed(work, held, sources)
        return cls(name, terms, packed, computation, size, num_clients, given)


def _stored_if_large(comp: plans.Subround) -> tuple[bytes | list[Any], Any]:
    """Return the computation of a plan and its kernel: as they are, or references."""
    if not isinstance(comp.kernel, plans.Kernel):  # packed before, by the driver
        return comp.computation, comp.kernel
    if not stored_kernels.is_large(comp.kernel, comp.computation):
        return comp.computation, comp.kernel
    kernel, computation = stored_kernels.store_kernel(comp.kernel, comp.computation)
    return [computation], kernel
