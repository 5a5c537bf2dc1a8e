"""Ray's errors as ray_fed's: what died, what may be retried, what the user did."""

import ray.exceptions

import ray_fed.errors as errors
from ray_fed.cluster.pool import FailureClass

LOST_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OutOfMemoryError,
)
"""What a caller sees when a worker, its node or an object on it is gone."""


def classify(error: BaseException) -> FailureClass:
    """Return the budget that the loss of a worker is counted against."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "memory"
    if getattr(error, "preempted", False):
        return "preemption"
    return "crash"


def describe(error: BaseException) -> str:
    """Return what Ray says of a loss, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])[:400] or type(error).__name__


def unwrap(error: ray.exceptions.RayTaskError) -> BaseException:
    """Return what a task or actor method raised, as it was raised there."""
    cause: object = error.cause
    while isinstance(cause, ray.exceptions.RayTaskError):
        cause = cause.cause
    if isinstance(cause, BaseException):
        return cause
    return errors.ClusterError(f"Expected a result, found: {describe(error)}")
