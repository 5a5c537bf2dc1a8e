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

One layer tries again: Ray, which runs the task of a subround again when it raises
`WorkerLost`, or when the task's own process dies. An attempt that fails notes its class
(`subround.AttemptNotes`), and one whose class has failed too often raises what ends the
subround instead. Ray's own limit, the sum of all budgets, is thus never what ends a
subround by itself.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import ray
import ray.exceptions
from ray._private import state as ray_state  # no public name for why a process ended
from ray.core.generated import common_pb2, gcs_pb2

import ray_fed.errors as errors
from ray_fed.plan.fingerprint import WorkerDescription
from ray_fed.plan.outcomes import Attempt

GONE = "the process that drove it is gone"

FailureClass: TypeAlias = Literal["crash", "preemption", "memory", "hang"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an attempt at a subround came to nothing.

    Attributes:
        failure_class: whose budget it is counted against.
        detail: which worker on which node, and what happened, in words.
        client_index: whose work it was, in the cohort; None where nobody can tell.
        cause_text: the worker's traceback, where it lived to tell.
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


_TROUBLE = (ray.exceptions.RayError, RuntimeError, ValueError)
"""The cluster itself cannot be asked: a crash is what is known."""


def classify(error: BaseException) -> FailureClass:
    """Return the budget that the loss of a worker is counted against."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "memory"
    if getattr(error, "preempted", False):
        return "preemption"
    return "crash"


def find_cause(error: BaseException, worker: WorkerDescription | None) -> Failure:
    """Return why a worker was lost, as far as the cluster knows; asks it.

    An actor that Ray restarts is reported as unavailable, whatever ended its process:
    the table of processes has the reason.

    Args:
        error: what the caller of the worker saw.
        worker: what it said of itself; None where it never was ready.
    """
    failure_class, detail = classify(error), describe(error)
    if failure_class != "crash" or worker is None:
        return Failure(failure_class, detail)

    def is_worker(process: Any) -> bool:
        node: str = process.worker_address.node_id.hex()
        return (node, process.pid) == (worker.node, worker.pid)

    if _ran_out_of_memory(is_worker):
        return Failure("memory", f"{detail} Ray ended it for want of memory.")
    with contextlib.suppress(*_TROUBLE):
        if worker.node in cast("Any", ray_state).state.get_draining_nodes():
            return Failure("preemption", detail)
    return Failure(failure_class, detail)


def find_cause_of_silence(submitted: float) -> Failure:
    """Return why the process of a task ended, which could not tell; asks the cluster.

    Where memory runs out, Ray ends processes of tasks before those of workers.

    Args:
        submitted: when the task was, in seconds of time.
    """
    job: str = ray.get_runtime_context().get_job_id()

    def is_of_task(process: Any) -> bool:
        return process.job_id.hex() == job and process.end_time_ms > submitted * 1000

    if _ran_out_of_memory(is_of_task):
        return Failure("memory", f"{GONE}: Ray ended it for want of memory")
    return Failure("crash", GONE)


def _ran_out_of_memory(is_meant: Callable[[Any], bool]) -> bool:
    """Return whether Ray ended a process that is meant when memory ran out."""
    table = cast("Any", gcs_pb2).WorkerTableData
    ran_out = cast("Any", common_pb2).WorkerExitType.Value("NODE_OUT_OF_MEMORY")
    with contextlib.suppress(*_TROUBLE):
        state = cast("Any", ray_state).state
        accessor = state._connect_and_get_accessor()  # noqa: SLF001
        processes = map(table.FromString, accessor.get_worker_table())
        return any(p.exit_type == ran_out and is_meant(p) for p in processes)
    return False


def check_budgets(
    lost: Sequence[Attempt], budgets: Mapping[str, int], last: Failure
) -> None:
    """Raise where a subround has failed too often.

    Args:
        lost: its attempts that failed, the last one, too.
        budgets: failures of each class that it may have.
        last: the latest failure.

    Raises:
        DeadlineError: it hung too often.
        RetryBudgetError: it failed too often in another way.
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
