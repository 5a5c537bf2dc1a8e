"""Ray's errors as ray_fed's: what died, what may be tried again, what the user did.

    class        what                                           who tries again
    crash        a process or node died, an object was lost     Ray: the task
    preemption   a node was taken away with notice              Ray: the task
    memory       killed for want of memory, or TensorFlow       Ray: the task
                 found none
    hang         a worker was still at it after                 Ray: the task
                 `subrounds.timeout_s`, and was killed
    application  the user's computation raised                  nobody
    fatal        what no other attempt can mend                 nobody

One layer tries again. Ray runs the task of a subround again when it raises `WorkerLost`
or its own process dies (`runner` does it for tasks whose results are kept, which Ray
must not remember); workers themselves are never restarted, nor their calls repeated.
The pool counts each failure by subround and class, deaths of a task's own process too,
and refuses the lease that would be one too many. Ray's own limit, the sum of all
budgets, is thus never what ends a subround, not even where Ray would go on for ever
(tasks that were killed for want of memory).
"""

from typing import Literal

import ray.exceptions

import ray_fed.errors as errors
from ray_fed.cluster.pool.actions import FailureClass

LOST_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OutOfMemoryError,
)
"""What a caller sees when a worker, its node or an object on it is gone."""


FATAL_ERRORS = (
    ray.exceptions.RuntimeEnvSetupError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.TaskUnschedulableError,
    ray.exceptions.OwnerDiedError,
    ray.exceptions.OutOfDiskError,
    ray.exceptions.ObjectStoreFullError,
    ray.exceptions.AuthenticationError,
)
"""What would only fail again."""


def classify(error: BaseException) -> FailureClass:
    """Return the budget that the loss of a worker is counted against."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "memory"
    if getattr(error, "preempted", False):
        return "preemption"
    return "crash"


def is_loss(error: BaseException) -> bool:
    """Return whether work that met this error may end well on another worker."""
    return isinstance(error, LOST_ERRORS) and not isinstance(error, FATAL_ERRORS)


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


def final_error(error: BaseException) -> BaseException:
    """Return what a caller of ray_fed sees for what ended a task."""
    if isinstance(error, ray.exceptions.RayTaskError):
        error = unwrap(error)
    if not isinstance(error, ray.exceptions.RayError):
        return error
    failure_class: FailureClass | Literal["fatal"] = classify(error)
    if isinstance(error, FATAL_ERRORS):
        failure_class = "fatal"
    return errors.RetryBudgetError(
        f"Expected a subround to finish, found {type(error).__name__}:"
        f" {describe(error)}",
        failure_class,
    )
