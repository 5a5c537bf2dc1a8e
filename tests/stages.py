"""Stages and kernels of computations, for tests of what runs them."""

from typing import Any

import federated_language as fl

import ray_fed.plan.plans as plans
from ray_fed.compiler.form import Stage
from ray_fed.compiler.fuse import fuse
from ray_fed.compiler.split import compile_to_chain


def summed(work: Any) -> Any:
    """Return the computation that sums what clients' work comes to."""

    @fl.federated_computation(
        fl.FederatedType(work.type_signature.parameter, fl.CLIENTS)
    )
    def run(data: Any) -> Any:
        return fl.federated_sum(fl.federated_map(work, data))

    return run


def stage_of(comp: Any) -> Stage:
    """Return the one stage of a computation."""
    (stage,) = compile_to_chain(comp).stages
    return stage


def kernel_of(comp: Any) -> plans.Kernel:
    """Return the kernel of the one stage of a computation."""
    kernel = fuse(stage_of(comp).up_to_merge)
    assert isinstance(kernel, plans.Kernel)
    return kernel
