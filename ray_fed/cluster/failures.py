"""Sorts Ray's errors into failure classes, and asks the cluster for their causes.

A failure class has a budget: the number of its failures that one subround may have.

    class        cause                                          repeated
    crash        a process or node died, an object was lost     the worker's part
    preemption   a node was removed after a notice              the worker's part
    memory       Ray killed the worker because memory ran       the worker's part
                 out, or TensorFlow could not allocate any
    hang         a worker ran for longer than                   the worker's part
                 `subrounds.timeout_s`, and was killed
    application  the user's computation raised an error         nothing
    fatal        an error that every attempt would meet         nothing

If a worker is lost, `ray_strategy.WorkerConnection` repeats the worker's part. If the
process of the subround's task is lost, Ray repeats the task. `subround.Attempts` counts
both. Ray's own limit is the sum of all budgets, so a budget is always spent first.
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
        failure_class: Class of the failure, see the module.
        detail: Sentence that names the worker, its node and the cause.
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
"""Errors that Ray raises if a worker, its node or an object on the node is lost."""


FATAL_ERRORS = (
    ray.exceptions.RuntimeEnvSetupError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.TaskUnschedulableError,
    ray.exceptions.OwnerDiedError,
    ray.exceptions.OutOfDiskError,
    ray.exceptions.ObjectStoreFullError,
    ray.exceptions.AuthenticationError,
)
"""Errors of Ray that another attempt would meet again."""


_TROUBLE = (ray.exceptions.RayError, RuntimeError, ValueError)
"""Errors that a query about a failure may raise. The failure then counts as a crash."""


def classify(error: BaseException) -> FailureClass:
    """Return the failure class of an error that Ray raised for a lost worker."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "memory"
    if getattr(error, "preempted", False):
        return "preemption"
    return "crash"


def find_cause(error: BaseException, worker: WorkerDescription | None) -> Failure:
    """Ask the cluster why a worker was lost, and return the failure.

    `error` is Ray's error. While Ray restarts an actor, the error only says that the
    actor is unavailable. So this function searches Ray's table of ended processes for
    `worker`. With None as `worker`, only the error decides.
    """
    failure_class, detail = classify(error), describe(error)
    if failure_class != "crash" or worker is None:
        return Failure(failure_class, detail)
    with contextlib.suppress(*_TROUBLE):
        for process in inventory.read_out_of_memory():
            node: str = process.worker_address.node_id.hex()
            if (node, process.pid) == (worker.node, worker.pid):
                ended = "Ray ended the process because memory ran out."
                return Failure("memory", f"{detail} {ended}")
        if worker.node in inventory.read_draining():
            return Failure("preemption", detail)
    return Failure(failure_class, detail)


def find_cause_of_silence(submitted: float) -> Failure:
    """Ask the cluster why the process of this task ended before its present run.

    `submitted` is the `time.time` at which the task was submitted. When memory runs
    out, Ray ends the processes of tasks before the processes of actors.
    """
    job: str = ray.get_runtime_context().get_job_id()
    gone = "the process that drove it is gone"
    with contextlib.suppress(*_TROUBLE):
        for process in inventory.read_out_of_memory():
            is_later = process.end_time_ms > submitted * 1000
            if is_later and process.job_id.hex() == job:
                return Failure("memory", f"{gone}: Ray ended it as memory ran out")
    return Failure("crash", gone)


def check_budgets(
    lost: Sequence[Attempt], budgets: Mapping[str, int], last: Failure
) -> None:
    """Raise an error if a subround has had too many failures of the class of `last`.

    `lost` has all failed attempts, the latest one last. `budgets` has the number of
    failures that each class may have. Raises DeadlineError for the class "hang", and
    RetryBudgetError for the other classes.
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
    """Return whether Ray lost a worker, so its work may succeed on another worker."""
    return isinstance(error, LOST_ERRORS) and not isinstance(error, FATAL_ERRORS)


def describe(error: BaseException) -> str:
    """Return an error's message in one line of at most 400 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])[:400] or type(error).__name__


def unwrap(error: ray.exceptions.RayTaskError) -> BaseException:
    """Return the error that the code of a task or actor method raised."""
    cause: object = error.cause
    while isinstance(cause, ray.exceptions.RayTaskError):
        cause = cause.cause
    if isinstance(cause, BaseException):
        return cause
    return errors.ClusterError(f"Expected a result, found: {describe(error)}")


def final_error(error: BaseException) -> BaseException:
    """Convert the error of a Ray task to the error that users get.

    An error of the task's code is unwrapped. Ray's own errors become RetryBudgetErrors.
    """
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
