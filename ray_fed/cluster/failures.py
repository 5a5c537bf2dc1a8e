"""Sorts Ray's errors into classes, each with its budget, and finds their causes.

    class        cause                                          repeated
    crash        a process or node died, an object was lost     the worker's part
    preemption   a node was taken away with notice              the worker's part
    memory       Ray killed the worker because memory ran       the worker's part
                 out, or TensorFlow could not allocate any
    hang         a worker ran for longer than                   the worker's part
                 `subrounds.timeout_s`, and was killed
    application  the user's computation raised an error         nothing
    fatal        an error that every attempt would meet         nothing

`ray_strategy.WorkerConnection` repeats work whose worker is lost, and counts the losses
of each class. Ray repeats a task whose own process is lost. `subround.Attempts` counts
these runs too, so Ray's own limit, the sum of all budgets, never ends a subround.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import ray
import ray.exceptions

import ray_fed.errors as errors
from ray_fed.cluster import inventory
from ray_fed.plan.fingerprint import WorkerDescription
from ray_fed.plan.outcomes import Attempt

FailureClass: TypeAlias = Literal["crash", "preemption", "memory", "hang"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an attempt at a subround failed.

    Attributes:
        failure_class: Class whose budget the failure counts against.
        detail: Name of the worker, its node, and the event, in words.
        client_index: Index in the cohort of the client whose work failed, or None if it
            is unknown.
        cause_text: The worker's traceback, or "" if the worker could not report it.
    """

    failure_class: FailureClass
    detail: str
    client_index: int | None = None
    cause_text: str = ""


LOST_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OutOfMemoryError,
)
"""Errors that a caller gets if a worker, its node or an object on it is lost."""


FATAL_ERRORS = (
    ray.exceptions.RuntimeEnvSetupError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.TaskUnschedulableError,
    ray.exceptions.OwnerDiedError,
    ray.exceptions.OutOfDiskError,
    ray.exceptions.ObjectStoreFullError,
    ray.exceptions.AuthenticationError,
)
"""Errors that another attempt would meet again."""


_TROUBLE = (ray.exceptions.RayError, RuntimeError, ValueError)
"""Errors of a query to the cluster. The failure then counts as a crash."""


def classify(error: BaseException) -> FailureClass:
    """Return the class whose budget the loss of a worker counts against."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "memory"
    if getattr(error, "preempted", False):
        return "preemption"
    return "crash"


def find_cause(error: BaseException, worker: WorkerDescription | None) -> Failure:
    """Ask the cluster why a worker was lost, and return the cause.

    Ray calls an actor that it restarts unavailable, whatever ended its process. Only
    Ray's table of processes has the reason.
    """
    failure_class, detail = classify(error), describe(error)
    if failure_class != "crash" or worker is None:
        return Failure(failure_class, detail)
    with contextlib.suppress(*_TROUBLE):
        for process in inventory.read_out_of_memory():
            node: str = process.worker_address.node_id.hex()
            if (node, process.pid) == (worker.node, worker.pid):
                return Failure("memory", f"{detail} Ray ended it for want of memory.")
        if worker.node in inventory.read_draining():
            return Failure("preemption", detail)
    return Failure(failure_class, detail)


def find_cause_of_silence(submitted: float) -> Failure:
    """Ask the cluster why the process of a task ended without an error.

    When memory runs out, Ray ends the processes of tasks before the workers.
    `submitted` is a `time.time`.
    """
    job: str = ray.get_runtime_context().get_job_id()
    gone = "the process that drove it is gone"
    with contextlib.suppress(*_TROUBLE):
        for process in inventory.read_out_of_memory():
            is_later = process.end_time_ms > submitted * 1000
            if is_later and process.job_id.hex() == job:
                return Failure("memory", f"{gone}: Ray ended it for want of memory")
    return Failure("crash", gone)


def check_budgets(
    lost: Sequence[Attempt], budgets: Mapping[str, int], last: Failure
) -> None:
    """Raise an error if a subround has failed too often.

    The error is a DeadlineError if the subround hung too often, and a RetryBudgetError
    otherwise. `lost` includes the latest attempt.
    """
    failure_class = last.failure_class
    count = sum(attempt.ended == failure_class for attempt in lost)
    limit = budgets[failure_class]
    if count <= limit:
        return
    message = (
        f"Expected at most {limit} failures of {failure_class}"
        f" in one subround (`retry.{failure_class}`), found {count}."
        f" The last: {last.detail}"
    )
    location = errors.Location(
        client_index=last.client_index, node=lost[-1].node, attempt=lost[-1].attempt
    )
    if failure_class == "hang":
        raise errors.DeadlineError(message, location, last.cause_text)
    raise errors.RetryBudgetError(message, failure_class, location, last.cause_text)


def is_loss(error: BaseException) -> bool:
    """Return whether work that failed with this error may succeed elsewhere."""
    return isinstance(error, LOST_ERRORS) and not isinstance(error, FATAL_ERRORS)


def describe(error: BaseException) -> str:
    """Return Ray's message about a loss in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])[:400] or type(error).__name__


def unwrap(error: ray.exceptions.RayTaskError) -> BaseException:
    """Return the original error that a task or actor method raised."""
    cause: object = error.cause
    while isinstance(cause, ray.exceptions.RayTaskError):
        cause = cause.cause
    if isinstance(cause, BaseException):
        return cause
    return errors.ClusterError(f"Expected a result, found: {describe(error)}")


def final_error(error: BaseException) -> BaseException:
    """Return the error that a caller of ray_fed gets for an error of a task."""
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
