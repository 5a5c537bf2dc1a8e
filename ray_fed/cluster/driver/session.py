"""The home of Ray: connect or start, see what there is, leave it as it was found."""

import asyncio
import atexit
import collections
import concurrent.futures
import dataclasses
import logging
import math
import pathlib
import sys
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any, cast

import ray
import ray.exceptions
from ray._private import state as ray_state  # no public name for jobs
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray_fed.errors as errors
from ray_fed.cluster import failures, workers
from ray_fed.cluster.driver import autoscaling, inventory, joining, sizing
from ray_fed.cluster.driver.holders import Holders
from ray_fed.cluster.driver.kept_leases import KeptLeases
from ray_fed.cluster.driver.ray_cluster import RayCluster
from ray_fed.cluster.driver.runner import RayRunner
from ray_fed.cluster.jobs import Job, JobActor
from ray_fed.cluster.pool.actions import Size
from ray_fed.cluster.store import object_store
from ray_fed.cluster.task import leases
from ray_fed.cluster.task.leases import PooledWorker
from ray_fed.config import Config
from ray_fed.plan.fingerprint import Versions
from ray_fed.plan.outcomes import Progress
from ray_fed.values import stored
from ray_fed.values.client_references import ClientRun

_logger = logging.getLogger(__name__)

_RUNNERS_PER_WORKER = 2
"""Subround tasks in flight a worker: one runs, one waits with its argument at hand."""

_IDLE_COORDINATOR_MS = 600_000
"""Ray ends idle task processes after seconds; the next round would start them anew."""

_CLOSE_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True)
class _Counted:
    """What the pool last said of its workers.

    Attributes:
        num_workers: that it has.
        holds_s: for how long, from then on; 0: it may be wrong at once.
        until_s: the end of that, by the monotonic clock.
    """

    num_workers: int
    holds_s: float
    until_s: float

    @classmethod
    def now(cls, num_workers: int, holds_s: float) -> "_Counted":
        """Note what was said right now."""
        return cls(num_workers, holds_s, time.monotonic() + holds_s)


def _say_nothing(activity: str) -> None:
    del activity


class Session:
    """A connection to Ray with a pool of workers on it; owns what it started.

    Args:
        address: as for `ray_fed.init`.
        config: of the pool.
        say: told what is waited for, in a few words.
        needs_all: whether a pool of fixed size is of no use with fewer workers.

    Attributes:
        place: which Ray it is on, in a few words.

    Raises:
        ClusterError: there is no cluster at the address.
        ResourceError: the cluster is smaller than what `workers` asks for, and what
            it asks for is no range.
    """

    def __init__(
        self,
        address: str | None,
        config: Config,
        say: Callable[[str], None] = _say_nothing,
        *,
        needs_all: bool = False,
    ) -> None:
        self._config = config
        self._tokens: set[str] = set()  # of sources whose clients workers may keep
        self._gone: collections.deque[str] = collections.deque()
        self._name = uuid.uuid4().hex[:8]
        self._counted = _Counted(0, 0.0, -math.inf)
        joining.check_address(address)
        was_connected = ray.is_initialized()
        try:
            self._owns_ray = _connect(address, config, say)
            self.place = _name_place(owns_ray=self._owns_ray)
            self._program = _name_program()
            group = get_current_placement_group()
            size = sizing.decide_size(
                config,
                inventory.live_resources(group),
                may_grow=group is None and not joining.started_here(),
                held=None if group is None else inventory.held_resources(),
            )
            if needs_all and size.is_fixed:
                size = dataclasses.replace(size, least=size.most)
            self._size = size
            cluster = RayCluster(config, self._name, self._program, group)
            self._job = Job.current()
            self._pool = JobActor(_start_pool(config, self._size, cluster), self._job)
            self._pool.begin_round.remote()
            self._kept = KeptLeases(self._pool, self._size.most)
        except BaseException:
            if not was_connected:
                ray.shutdown()  # also a Ray that began to start, or one that was joined
            raise
        atexit.register(self.close)

    @property
    def max_workers(self) -> int:
        """How many workers there may be."""
        return self._size.most

    async def count_workers(self) -> int:
        """Let the pool follow the cluster; return how many workers a round has.

        Where it had all its workers when it was asked last, a round does not wait for
        the answer: the next one has it.

        Raises:
            ClusterError: the pool is gone.
        """
        known = self._counted
        if time.monotonic() < known.until_s:
            return known.num_workers
        if known.holds_s:
            self._counted = _Counted.now(known.num_workers, known.holds_s)
            asked: Any = self._pool.begin_round.remote()
            asked.future().add_done_callback(self._note_count)
            return known.num_workers
        self._kept.give_back()  # those on nodes that go are ended then
        try:
            with self._job.watched():
                self._counted = _Counted.now(*await self._pool.begin_round.remote())
        except ray.exceptions.RayError as error:
            raise _pool_gone(error) from error
        return self._counted.num_workers

    def _note_count(self, answer: concurrent.futures.Future[Any]) -> None:
        failed = answer.cancelled() or answer.exception() is not None
        num_workers, holds_s = (0, 0.0) if failed else answer.result()
        self._counted = _Counted.now(num_workers, holds_s)

    async def await_ready(self, seen: Progress | None) -> Progress:
        """Return how far the workers are, once that is not what was seen before.

        See `PoolHost.await_ready`.

        Raises:
            ClusterError: the pool is gone.
        """
        found = seen
        while found is None or found == seen:
            try:
                with self._job.watched():
                    answer = await self._pool.await_ready.remote(seen)
            except ray.exceptions.RayError as error:
                raise _pool_gone(error) from error
            found = cast("Progress", answer)
        return found

    def runners(self) -> list[RayRunner]:
        """Return what runs subrounds, more than there are workers."""
        handles, holders = leases.Handles(), Holders()
        return [
            RayRunner(
                self._pool, self._config, self._program, handles, self._kept, holders
            )
            for _ in range(_RUNNERS_PER_WORKER * self.max_workers)
        ]

    def store(self, value: Any) -> tuple[Any, int]:
        """Put a large value into the object store once; see `object_store.store`.

        Sources of clients that are gone are forgotten on workers at the next call.
        """
        self._job.check()
        if isinstance(value, ClientRun) and value.source.token not in self._tokens:
            token = value.source.token
            self._tokens.add(token)
            weakref.finalize(value.source, self._gone.append, token).atexit = False
        self._forget_gone()
        return object_store.store(value)

    def _forget_gone(self) -> None:
        tokens: list[str] = []
        while self._gone:
            tokens.append(self._gone.popleft())
        if tokens:
            self._tokens.difference_update(tokens)
            self._pool.forget_clients.remote(tokens)

    def check(self) -> None:
        """Raise unless this process is still connected to the pool's Ray.

        Raises:
            ContextStateError: Ray was shut down, or another one is there.
        """
        self._job.check()

    def sources(self) -> list[PooledWorker]:
        """Return workers of the pool, to be held for as long as it lives.

        As many as it has at least.
        """
        return [PooledWorker(self._pool) for _ in range(self._size.least)]

    async def fetch(self, value: Any) -> Any:
        """Return a value that runners kept: read from the object store, if it is there.

        Raises:
            ClusterError: the object store has lost it.
            DeadlineError: it did not come within `subrounds.timeout_s`.
        """
        if not isinstance(value, stored.Stored):
            return value
        try:
            reference = cast("Any", value.reference)
            timeout_s = self._config.subrounds.timeout_s
            with self._job.watched():
                return object_store.decode(await asyncio.wait_for(reference, timeout_s))
        except TimeoutError as error:
            raise errors.DeadlineError(
                "Expected a stored value within"
                f" {self._config.subrounds.timeout_s} s (`subrounds.timeout_s`), found"
                " it still on its way."
            ) from error
        except ray.exceptions.RayError as error:
            raise errors.ClusterError(
                "Expected a value in the object store, found it lost: go on from state"
                f" that was saved. {failures.describe(error)}"
            ) from error

    def close(self) -> None:
        """End the workers, then the Ray that was started here, if it was."""
        atexit.unregister(self.close)
        self._kept.close()
        if not self._job.is_current:
            return
        try:
            closing: Any = self._pool.close.remote()
            if ray.wait([closing], timeout=_CLOSE_TIMEOUT_S)[0]:
                # Not killed: it tells Ray first that the last calls ended well.
                self._pool.handle.__ray_terminate__.remote()
            else:
                ray.kill(self._pool.handle)
            # Once more: the pool may have been gone before it could.
            autoscaling.withdraw(self._name)
        except ray.exceptions.RayError:
            _logger.debug("The pool was gone before it was closed.", exc_info=True)
        if self._owns_ray:
            ray.shutdown()


def _name_program() -> str:
    """Return what to call the program that this process is of, in Ray's lists."""
    words = sys.argv[:1]
    runtime = ray.get_runtime_context()
    if runtime.worker.mode == ray.WORKER_MODE:  # a task or actor: its job's program
        job: str = runtime.get_job_id()
        jobs = cast("list[dict[str, Any]]", ray_state.jobs())
        found = (j["Entrypoint"] for j in jobs if j["JobID"] == job)
        words = next(found, "").split()
    scripts = [pathlib.Path(word) for word in words if word.endswith(".py")]
    if not scripts:
        return "python"
    if scripts[0].name == "ipykernel_launcher.py":
        return "notebook"
    is_module = scripts[0].name == "__main__.py"
    return scripts[0].parent.name if is_module else scripts[0].name


def _name_place(*, owns_ray: bool) -> str:
    address: str = ray.get_runtime_context().gcs_address
    return f"its own Ray at {address}" if owns_ray else f"joined the Ray at {address}"


def _pool_gone(error: ray.exceptions.RayError) -> errors.ClusterError:
    return errors.ClusterError(
        "Expected the pool of workers to answer, found it gone: call ray_fed.init"
        f" again. {failures.describe(error)}"
    )


def _start_pool(config: Config, size: Size, cluster: RayCluster) -> Any:
    """Start the host of a pool on the driver's node: what would the pool do without."""
    here: str = ray.get_runtime_context().get_node_id()
    actor = workers.RemotePoolHost.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)
    )
    label = f"ray_fed pool of {cluster.program}"
    return actor.remote(config, size, Versions.read(), cluster, label)


def _connect(address: str | None, config: Config, say: Callable[[str], None]) -> bool:
    """Connect this process to Ray; return whether a Ray was started for it."""
    if ray.is_initialized():
        joining.check_connected(address)
        say("using the Ray that this process is connected to")
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.runtime_env is not None:
        options["runtime_env"] = config.model_dump()["runtime_env"]
    if address != "local":
        say("looking for Ray")
        found = joining.find(address)
        if found is not None:
            say(f"joining {found}")
            joining.join(found, **options)
            return False
        if address is not None:
            raise joining.missing_error(address)
    # Before Ray takes seconds to start for nothing.
    sizing.decide_size(config, [inventory.machine_resources()], may_grow=False)
    say("starting a Ray of its own")
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            _system_config={
                "idle_worker_killing_time_threshold_ms": _IDLE_COORDINATOR_MS
            },
            **options,
        )
    except Exception as error:  # Ray raises bare ones for a start that fails
        raise errors.ClusterError(
            f"Expected Ray to start on this machine, found: {error} Try again when the"
            ' machine is less busy, or run without Ray: Config(backend="local").'
        ) from error
    return True
