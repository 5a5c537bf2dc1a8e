"""Connects to Ray or starts it, and runs plans on a pool of workers there.

A plan is the work of one subround (a part of a round) or of the finish of a round, as
data. A `Session` has the connection and the pool. A `RayRunner` runs the plans, and
sets the time limits and budgets of each plan.
"""

import asyncio
import atexit
import collections
import concurrent.futures
import dataclasses
import functools
import logging
import pathlib
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import federated_language as fl
import ray
import ray.exceptions
from ray.util.placement_group import get_current_placement_group
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.cluster import failures, inventory, joining, object_store, pool, subround
from ray_fed.cluster.joining import Job
from ray_fed.cluster.pool import HeldWorker, Member, Pool, name_clients
from ray_fed.cluster.subround import Attempts, Terms, Work
from ray_fed.config import Config, check_address
from ray_fed.language import blocks
from ray_fed.plan import outcomes
from ray_fed.values import components, stored
from ray_fed.values.client_references import ClientRun

_logger = logging.getLogger(__name__)

_IDLE_COORDINATOR_MS = 600_000
"""Milliseconds until Ray ends an idle task process. Ray's default is seconds, so the
next round would wait for a new process."""

_NAMED_CALLS = 100
"""Number of calls of a context that have their exact number in the names of tasks."""

_LOOK_S = 0.5
"""Seconds between checks of whether a long subround is a straggler."""


def _say_nothing(activity: str) -> None:
    del activity


class _Submitted:
    """One Ray task that runs a subround, with the workers that it uses until its end.

    Attributes:
        answer: Future of the task. It is set by `begin`.
        outcome: Outcome without values. It is set once the task has succeeded.
    """

    def __init__(self, runner: "RayRunner", comp: Any, arg: Any, name: str) -> None:
        self._pool, self._runner = runner.pool, runner
        self.comp, self.arg, self.name = comp, arg, name
        self._begun_s = time.monotonic()
        self._team: Sequence[Member] = ()
        self._references: list[Any] = []
        self.answer: asyncio.Future[Any]
        self.outcome: outcomes.Outcome

    def begin(self, team: Sequence[Member]) -> None:
        self._team = team
        self._begun_s = time.monotonic()
        try:
            handles, terms = self._runner.terms_of(team)
            work = Work.of(self.name, terms, self.comp, self.arg)
            task = self._runner.task_of(self.comp)
            self._references = task.remote(handles, *work.as_arguments())
        except BaseException:
            self._pool.give_back(team)
            raise
        answer: concurrent.futures.Future[Any] = self._references[0].future()
        self._pool.running.add(answer)
        answer.add_done_callback(self._end)
        self.answer = asyncio.wrap_future(answer)

    def _end(self, answer: "concurrent.futures.Future[Any]") -> None:
        self._pool.running.discard(answer)
        lost: Sequence[outcomes.Attempt] = ()
        if not answer.cancelled() and answer.exception() is None:
            self.outcome = pickle.loads(answer.result())
            lost = self.outcome.lost
        self._pool.give_back(self._team, lost)

    async def wait(self, timeout_s: float | None = None) -> bool:
        # If the task has failed, `answer.result` raises its error.
        done, _ = await asyncio.wait({self.answer}, timeout=timeout_s)
        for answer in done:
            answer.result()
        return bool(done)

    @property
    def values(self) -> list[Any]:
        return self._references[1:]  # the first one is the outcome

    def leave(self) -> None:
        """End the task's work on all workers, and ignore its result.

        This does not use `ray.cancel`: if the task answers at the same moment, Ray 2.60
        ends this process with a failed check (seen 2026-11-22).
        """
        self._pool.end(self.name)
        if self._references:
            self.answer.add_done_callback(joining.read_error)
        self._pool.job.read_errors(self._references)
        # The traceback of a raised error would keep these references alive.
        self._references.clear()

    def as_slower(self) -> outcomes.Attempt:
        member = self._team[0]
        described = member.described
        return outcomes.Attempt.on(
            member.name,
            described,
            attempt=1,
            seconds=time.monotonic() - self._begun_s,
            ended="slower",
            detail="another worker had the result first",
            fingerprint=None if described is None else described.fingerprint,
        )


class RayRunner(fl.framework.AsyncContext):
    """Runs plans: a subround as a Ray task, and a finish as a call to a worker.

    A finish is the end of a round, with the server's work. If a worker is lost, the
    task (or here, a finish) continues on another worker. If the process of the task is
    lost, Ray repeats the task. Both count against the budgets of `config.retry`. If a
    subround takes far longer than its siblings, a copy starts on an idle worker, and
    the first result counts.

    Args:
        workers: Pool of the workers, which the runner does not own.
        config: The settings.
        program: Name of the run in the names of Ray's tasks.
    """

    def __init__(self, workers: Pool, config: Config, program: str) -> None:
        self.pool = workers
        self._config = config
        self._program = program

    @override
    async def invoke(self, comp: Any, arg: Any) -> outcomes.Outcome:
        with self.pool.job.watched():
            if isinstance(comp, plans.Finish):
                return await self._finish(comp, arg)
            clients = name_clients(arg)
            first = _Submitted(self, comp, arg, self.pool.new_name())
            team = await self.pool.take(clients, comp.num_workers)
            try:
                first.begin(team)
                slower: tuple[outcomes.Attempt, ...] = ()
                ended = first
                if self._config.stragglers.enabled:
                    ended, slower = await self._run_with_backup(first)
                else:
                    await first.wait()
            except BaseException as error:  # noqa: BLE001 (translated and raised)
                first.leave()
                raise failures.final_error(error) from None
            outcome = ended.outcome
            self.pool.note_holder(clients, outcome.worker)
            values: list[Any]
            values = list(map(stored.Stored, ended.values, outcome.value_bytes))
            if comp.components_type is not None:
                timeout_s = self._config.subrounds.timeout_s
                # The program may hold these values for long, so they must not depend on
                # the task.
                values = await subround.bring_home(values, timeout_s)
            elif comp.merge is None or comp.finish is not None:
                answer = self.pool.job.answer
                values = [
                    object_store.decode(await answer(ref)) for ref in ended.values
                ]
            lost = (*outcome.lost, *slower)
            return dataclasses.replace(outcome, values=tuple(values), lost=lost)

    async def _finish(self, comp: plans.Finish, arg: Any) -> outcomes.Outcome:
        # The driver calls the worker itself: a Ray task in between would take longer
        # than the rest of a small round's end.
        name = self.pool.new_name()
        stays = comp.components_type is not None
        team = await self.pool.take(b"", 1)
        lost: Sequence[outcomes.Attempt] = ()
        try:
            handles, terms = self.terms_of(team)
            work = Work.of(name, terms, comp, arg, _num_values(comp) if stays else 0)
            attempts = Attempts(handles, work, job=self.pool.job)
            outcome, values = await attempts.run()
            lost = outcome.lost
        except BaseException as error:  # noqa: BLE001 (translated and raised)
            self.pool.end(name)
            raise failures.final_error(error) from None
        finally:
            self.pool.give_back(team, lost)
        kept = tuple(values if stays else map(object_store.decode, values))
        return dataclasses.replace(outcome, values=kept)

    async def _run_with_backup(
        self, first: _Submitted
    ) -> tuple[_Submitted, tuple[outcomes.Attempt, ...]]:
        """Wait for a subround. If it becomes a straggler, also run a copy.

        Returns the attempt that ended first, and records of attempts that it overtook.
        """
        stragglers = self.pool.stragglers
        # Siblings may have different runners, so the key must not contain the runner.
        comp = first.comp
        siblings = f"{comp.draw.invocation}-{hash(comp.computation)}"
        stragglers.begin(siblings, first.name, time.monotonic())
        team: list[Member] = []
        try:
            pending_s = self._config.stragglers.min_s
            while not team:
                if await first.wait(pending_s):
                    return first, ()
                pending_s = _LOOK_S
                due_s = stragglers.due_s(siblings, first.name)
                if due_s is not None and due_s <= time.monotonic():
                    team = self.pool.take_now(b"", 1)
        finally:
            stragglers.end(siblings, first.name, time.monotonic())
        copy = _Submitted(self, first.comp, first.arg, f"{first.name}-copy")
        copy.begin(team)
        try:
            return await _first_of(first, copy)
        except BaseException:
            copy.leave()
            raise

    def terms_of(self, team: Sequence[Member]) -> tuple[list[Any], Terms]:
        """Return handles of workers, `team` first, and the `Terms` of a plan."""
        handles, known = self.pool.in_order(team)
        workers = self._config.workers
        return handles, Terms(
            workers=known,
            num_own=len(team),
            budgets=dict(self._config.retry),
            timeout_s=self._config.subrounds.timeout_s,
            wait_s=max(workers.start_timeout_s, workers.wait_timeout_s),
            fingerprint=self.pool.fingerprint,
            each=self.pool.size.each,
            submitted=time.time(),
        )

    def task_of(self, comp: Any) -> Any:
        """Return the task `run_subround` with Ray's options for a subround."""
        call = _name_call(comp.draw.invocation)
        name = f"ray_fed subround of {call} of {self._program}"
        retry = self._config.retry
        max_retries = retry.crash + retry.preemption + retry.memory + retry.hang
        return _task(name, 1 + _num_values(comp), max_retries)


async def _first_of(
    first: _Submitted, copy: _Submitted
) -> tuple[_Submitted, tuple[outcomes.Attempt, ...]]:
    # If the first attempt to end has failed, the other attempt's result counts.
    pending = {each.answer: each for each in (first, copy)}
    while True:
        done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            ended = pending.pop(future)
            if future.exception() is not None and pending:
                continue
            for slower in pending.values():
                slower.leave()
            future.result()
            return ended, tuple(slower.as_slower() for slower in pending.values())


@functools.lru_cache(maxsize=64)
def _task(name: str, num_returns: int, max_retries: int) -> Any:
    # Cached, because Ray checks options slowly.
    return subround.run_subround.options(
        num_returns=num_returns,
        max_retries=max_retries,
        name=name,
    )


def _name_call(number: int) -> str:
    # Large numbers become a range, such as `calls 100 to 199`, because Ray keeps state
    # for each task name in each process forever.
    if number < _NAMED_CALLS:
        return f"call {number}"
    step = 10 ** (len(str(number)) - 1)
    first = number - number % step
    return f"calls {first} to {first + step - 1}"


def _num_values(comp: plans.Subround | plans.Finish) -> int:
    if isinstance(comp, plans.Finish) or comp.finish is not None:
        count = 1
    else:
        count = len(comp.leaves) if comp.merge is None else len(comp.subtrees)
        count += comp.num_kept
    if comp.components_type is None:
        return count
    return count * len(
        components.component_types(blocks.parse_type(comp.components_type))
    )


class Session:
    """A connection to Ray with a pool of workers.

    The constructor joins a Ray, or starts one. `close` ends the pool, and a Ray that
    the session started.

    Args:
        address: Address of Ray, as for `ray_fed.init`.
        config: Settings of the pool. `worker_groups` must be empty, because a session
            has one pool.
        say: Function that receives descriptions of what the session does or waits for.
        needs_all: Whether `sources` returns all workers of a pool of fixed size, and
            not only one.

    Attributes:
        place: Description of the Ray that the session uses.
        program: Name of the run in Ray's lists, logs and metrics.
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
        self._tokens: set[str] = set()  # sources whose data workers may have cached
        self._gone: collections.deque[str] = collections.deque()
        check_address(address)
        if config.worker_groups:
            raise errors.ConfigError(
                "Expected no `worker_groups` for executors and contexts of one pool,"
                f" found {sorted(config.worker_groups)}: call ray_fed.init."
            )
        was_connected = ray.is_initialized()
        try:
            self._owns_ray = _connect(address, config, say)
            about = "its own Ray" if self._owns_ray else "joined the Ray"
            self.place = f"{about} at {ray.get_runtime_context().gcs_address}"
            self.program = config.name or _name_program()
            group = get_current_placement_group()
            size = pool.decide_size(
                config,
                inventory.live_resources(inventory.Demand.of(config), group),
                may_grow=group is None and not joining.started_here(),
                occupied=None if group is None else inventory.held_resources(),
            )
            if needs_all and size.is_fixed:
                size = dataclasses.replace(size, least=size.most)
            self._job = Job.current()
            self._pool = Pool(config, size, group, self.program, self._job)
        except BaseException:
            if not was_connected:
                ray.shutdown()  # ends a Ray that was started or joined here
            raise
        atexit.register(self.close)

    async def count_workers(self) -> int:
        """Return the number of workers for a round, see `Pool.count_workers`."""
        return await self._pool.count_workers()

    async def await_change(self, told: str | None) -> str:
        """Describe what calls wait for, see `Pool.await_change`."""
        with self._job.watched():
            return await self._pool.await_change(told)

    def runners(self) -> list[RayRunner]:
        """Return new runners, one for each worker that the pool may have."""
        return [
            RayRunner(self._pool, self._config, self.program)
            for _ in range(self._pool.size.most)
        ]

    def store(self, value: Any) -> tuple[Any, int]:
        """Put a large value into the object store once, see `object_store.store`.

        This also tells workers to drop their cached data of freed client sources.
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
            self._pool.forget_clients(tokens)

    def check(self) -> None:
        """Raise ContextStateError if this process left the pool's Ray or was forked."""
        self._job.check()

    def sources(self) -> list[HeldWorker]:
        """Return a `HeldWorker` for each of the pool's minimum of workers."""
        members = self._pool.members[: self._pool.size.least]
        return [HeldWorker(self._pool, m, dict(self._config.retry)) for m in members]

    async def fetch(self, value: Any) -> Any:
        """Return an outcome's value. A `Stored` value is read from the object store.

        Raises ClusterError if the store has lost the value, and DeadlineError if it
        does not arrive within `subrounds.timeout_s`.
        """
        if not isinstance(value, stored.Stored):
            return value
        try:
            reference = cast("Any", value.reference)
            timeout_s = self._config.subrounds.timeout_s
            with self._job.watched():
                return object_store.decode(
                    await asyncio.wait_for(self._job.answer(reference), timeout_s)
                )
        except TimeoutError as error:
            raise errors.DeadlineError(
                "Expected a stored value within"
                f" {self._config.subrounds.timeout_s} s (`subrounds.timeout_s`), found"
                " that it has not arrived."
            ) from error
        except ray.exceptions.RayError as error:
            raise errors.ClusterError(
                "Expected a value in the object store, found that it is lost: continue"
                f" from a saved state. {failures.describe(error)}"
            ) from error

    def close(self) -> None:
        """End the workers, and then Ray if the session started it."""
        atexit.unregister(self.close)
        try:
            self._pool.close(ray_ends=self._owns_ray)
        except ray.exceptions.RayError:
            _logger.debug("Ray was gone before the pool was closed.", exc_info=True)
        if self._owns_ray and self._job.is_current:
            ray.shutdown()


def _name_program() -> str:
    words = sys.argv[:1]
    runtime = ray.get_runtime_context()
    if runtime.worker.mode == ray.WORKER_MODE:  # a task or actor of the program's job
        words = inventory.read_entrypoint().split()
    scripts = [pathlib.Path(word) for word in words if word.endswith(".py")]
    if not scripts:
        return "python"
    if scripts[0].name == "ipykernel_launcher.py":
        return "notebook"
    is_module = scripts[0].name == "__main__.py"
    return scripts[0].parent.name if is_module else scripts[0].name


def _connect(address: str | None, config: Config, say: Callable[[str], None]) -> bool:
    # Returns whether this started a Ray.
    if ray.is_initialized():
        joining.check_connected(address)
        say("using the Ray that this process is connected to")
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.runtime_env is not None:
        options["runtime_env"] = config.model_dump()["runtime_env"]
    if address != "local":
        say("looking for Ray")
        cluster = joining.find(address)
        if cluster is not None:
            say(f"joining {cluster}")
            joining.join(cluster, **options)
            return False
        if address is not None:
            raise joining.missing_error(address)
    # Ray takes seconds to start, so refuse a configuration that cannot fit before that.
    resources = inventory.machine_resources(inventory.Demand.of(config))
    pool.decide_size(config, resources, may_grow=False)
    say("starting a Ray of its own")
    try:
        joining.start_ray(
            address="local",
            include_dashboard=False,
            _system_config={
                "idle_worker_killing_time_threshold_ms": _IDLE_COORDINATOR_MS
            },
            **options,
        )
    except Exception as error:  # Ray raises plain `Exception`s if a start fails
        raise errors.ClusterError(
            f"Expected Ray to start on this machine, found: {error} Try again when the"
            ' machine is less busy, or run without Ray: Config(backend="local").'
        ) from error
    return True
