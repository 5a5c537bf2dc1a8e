"""Stages and kernels of computations."""

from typing import Any

import federated_language as fl

import ray_fed.plan.plans as plans
from ray_fed.compiler.form import Stage
from ray_fed.compiler.fuse import fuse
from ray_fed.compiler.split import compile_to_chain


def summed(work: Any) -> Any:
    """Return a computation that maps `work` over clients, and sums the results."""

    @fl.federated_computation(
        fl.FederatedType(work.type_signature.parameter, fl.CLIENTS)
    )
    def run(data: Any) -> Any:
        return fl.federated_sum(fl.federated_map(work, data))

    return run


def stage_of(comp: Any) -> Stage:
    """Return the stage of a computation that has only one."""
    (stage,) = compile_to_chain(comp).stages
    return stage


def kernel_of(comp: Any) -> plans.Kernel:
    """Return the kernel of a computation that has only one stage."""
    kernel = fuse(stage_of(comp).up_to_merge)
    assert isinstance(kernel, plans.Kernel)
    return kernel
