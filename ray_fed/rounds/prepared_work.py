"""Computations as plans carry them: serialised, and fused into client kernels."""

import dataclasses

import federated_language as fl

from ray_fed.compiler.fuse import fuse
from ray_fed.language import blocks
from ray_fed.plan import plans
from ray_fed.rounds.computation_cache import ComputationCache
from ray_fed.rounds.policy import RoundPolicy

flf = fl.framework


class PreparedWork:
    """Prepares the computations of stages, each once while it is in use.

    Args:
        policy: whether and how client kernels are made.
    """

    def __init__(self, policy: RoundPolicy) -> None:
        self._policy = policy
        self._serialised = ComputationCache(blocks.serialize_computation)
        self._kernels = ComputationCache(self._plan_kernel)

    def serialise(self, comp: flf.ConcreteComputation) -> bytes:
        """Return a computation as plans carry it."""
        return self._serialised.get(comp)

    def fuse(
        self, up_to_merge: flf.ConcreteComputation
    ) -> plans.Kernel | plans.NoKernel | None:
        """Return the client kernel of a leaf's work, or why there is none.

        Returns:
            None where kernels are off.
        """
        if self._policy.call_s is None:
            return None
        return self._kernels.get(up_to_merge)

    def _plan_kernel(
        self, up_to_merge: flf.ConcreteComputation
    ) -> plans.Kernel | plans.NoKernel:
        kernel = fuse(up_to_merge)
        if isinstance(kernel, plans.NoKernel):
            return kernel
        return dataclasses.replace(
            kernel,
            jit=self._policy.jit,
            vectorised_clients=self._policy.vectorised_clients,
        )
