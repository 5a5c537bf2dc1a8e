"""Large kernels in the object store: a worker fetches one once, not with each call.

What makes a kernel large are constants of its graphs, such as a pretrained base.
"""

import dataclasses
import weakref
from typing import Any

import ray

import ray_fed.plan.plans as plans
from ray_fed.cluster.jobs import Job
from ray_fed.cluster.store.stored_sources import fetch
from ray_fed.values.lru_cache import LruCache

INLINE_BYTES = 256 * 1024
"""Smaller ones, with what they were fused of, travel with each call: what is in the
object store stays there as long as the driver has the kernel."""

_FETCHED_KERNELS = 16
"""Large kernels that one worker keeps, beside the graphs that it made of them."""


@dataclasses.dataclass(frozen=True)
class StoredKernel:
    """Stands in a plan for its kernel.

    Attributes:
        reference: to the kernel.
    """

    reference: Any


@dataclasses.dataclass
class _Held:
    """What stands for a kernel in the object store of one job.

    Attributes:
        job: whose it is.
        kernel: stands for it.
        computations: references to serialised computations that it was fused of.
    """

    job: Job
    kernel: StoredKernel
    computations: dict[bytes, Any]


_stored: weakref.WeakKeyDictionary[plans.Kernel, _Held] = weakref.WeakKeyDictionary()
"""For as long as this process holds the kernel."""


def is_large(kernel: plans.Kernel, computation: bytes) -> bool:
    """Return whether a kernel and what it was fused of are to be stored."""
    functions = (kernel.server, kernel.work, kernel.accumulate, computation)
    return sum(map(len, functions)) >= INLINE_BYTES


def store_kernel(kernel: plans.Kernel, computation: bytes) -> tuple[StoredKernel, Any]:
    """Return what stands for a kernel, and a reference to what it was fused of.

    Each is put the first time.

    Args:
        kernel: to run.
        computation: serialised; what the interpreter would run instead.
    """
    job = Job.current()
    held = _stored.get(kernel)
    if held is None or held.job != job:
        held = _stored[kernel] = _Held(job, StoredKernel(ray.put(kernel)), {})
    if computation not in held.computations:
        held.computations[computation] = ray.put(computation)
    return held.kernel, held.computations[computation]


class FetchedKernels:
    """The large kernels that one worker has met, by the names of their references."""

    def __init__(self) -> None:
        self._kernels: LruCache[bytes, plans.Kernel] = LruCache(_FETCHED_KERNELS)

    def in_plan(self, comp: Any) -> Any:
        """Return a plan with its kernel, fetched where a reference stands for it."""
        kernel = getattr(comp, "kernel", None)
        if not isinstance(kernel, StoredKernel):
            return comp
        reference = kernel.reference
        found = self._kernels.get(reference.binary(), lambda: fetch(reference))
        return dataclasses.replace(comp, kernel=found)
