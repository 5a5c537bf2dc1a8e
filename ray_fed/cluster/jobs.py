"""The job of Ray that this process is of: handles and references live no longer.

Ray starts another Ray by itself for a call that comes once it is shut down, and may end
a process that calls an actor of another session. So what calls later, or holds a handle
for long, asks here first.
"""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Generator
from typing import Any

import ray
from ray.util.client import ray as ray_client

import ray_fed.errors as errors

_LOOK_UP_S = 1.0
"""How often a call looks whether its job is over: Ray never answers it then."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One connection of this process to Ray.

    Attributes:
        session: Ray's name of it; each session counts its jobs from one.
        number: of the job in its session, or the name of a connection by Ray's client.
        pid: of the process; threads of Ray do not follow into one that is forked.
    """

    session: str
    number: str
    pid: int

    @classmethod
    def current(cls) -> "Job":
        """Return the one that this process is of; Ray is initialised."""
        if ray_client.is_connected():  # asks the cluster whatever is asked of it
            client: Any = ray_client.get_context().client_worker
            return cls("", client._client_id, os.getpid())  # noqa: SLF001
        context = ray.get_runtime_context()
        return cls(context.get_session_name(), context.get_job_id(), os.getpid())

    @property
    def is_current(self) -> bool:
        """Whether this process is still of it."""
        return (
            self.pid == os.getpid() and ray.is_initialized() and self == self.current()
        )

    def check(self) -> None:
        """Raise unless this process is still of it.

        Raises:
            ContextStateError: Ray was shut down, or the process was forked.
        """
        if not self.is_current:
            raise self._over()

    def _over(self) -> errors.ContextStateError:
        if self.pid != os.getpid():
            return errors.ContextStateError(
                "Expected the process that is connected to Ray, found one that was"
                " forked from it, which Ray does not support: start it by `spawn`, as"
                ' in multiprocessing.get_context("spawn").'
            )
        return errors.ContextStateError(
            "Expected the Ray that this was made on, found that this process has left"
            " it: `ray.shutdown` was called. Call ray_fed.init again; what was stored"
            " there is gone, so go on from state that was saved, and make clients of"
            " `ClientData.from_ray` anew."
        )

    @contextlib.contextmanager
    def explained(self) -> Generator[None]:
        """Raise why, in place of what Ray says, once the job is over.

        Raises:
            ContextStateError: the job is over, now or by the time that something fails.
        """
        self.check()
        try:
            yield
        except (Exception, asyncio.CancelledError):
            if not self.is_current:
                raise self._over() from None
            raise

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """End what the current task awaits inside, once the job is over.

        Raises:
            ContextStateError: the job is over, now or before the end.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        is_over = False

        def look() -> None:
            nonlocal is_over, timer
            if self.is_current:
                timer = loop.call_later(_LOOK_UP_S, look)
            elif task is not None:
                is_over = task.cancel()

        timer = loop.call_later(_LOOK_UP_S, look)
        try:
            with self.explained():
                yield
        finally:
            if is_over and task is not None:
                task.uncancel()
            timer.cancel()
            task = None  # `look` refers to itself: it is to hold no result of the task


class JobActor:
    """The handle of an actor, which is called only while its job lasts.

    Args:
        handle: of the actor.
        job: that it belongs to.
    """

    def __init__(self, handle: Any, job: Job) -> None:
        self.handle = handle
        self.job = job

    def __getattr__(self, name: str) -> Any:
        self.job.check()
        return getattr(self.handle, name)
