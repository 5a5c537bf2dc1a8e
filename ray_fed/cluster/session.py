"""The home of Ray: connect or start, see what there is, leave it as it was found."""

import asyncio
import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import pathlib
import pickle
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import federated_language as fl
import ray
import ray.exceptions
from ray._private import state as ray_state  # no public name for jobs
from ray.util.placement_group import get_current_placement_group
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.cluster import failures, inventory, joining, object_store, pool, subround
from ray_fed.cluster.joining import Job
from ray_fed.cluster.pool import HeldWorker, Member, Pool, name_clients
from ray_fed.cluster.subround import Attempt, Terms, Work
from ray_fed.config import Config
from ray_fed.language import blocks
from ray_fed.plan import outcomes
from ray_fed.plan.outcomes import Progress
from ray_fed.values import components, stored
from ray_fed.values.client_references import ClientRun

_logger = logging.getLogger(__name__)

_IDLE_COORDINATOR_MS = 600_000
"""Ray ends idle task processes after seconds; the next round would start them anew."""

_NAMED_CALLS = 100
"""Calls of a context whose tasks have names of their own."""

_LOOK_S = 0.5
"""How often to see whether a subround that takes long is a straggler."""


def _say_nothing(activity: str) -> None:
    del activity


class _Submitted:
    """A plan that runs as a task, on workers of the pool that are its own meanwhile.

    Args:
        runner: that runs it.
        comp: the plan.
        arg: that it takes.
        name: of the subround.

    Attributes:
        comp: the plan.
        arg: that it takes.
        name: of the subround.
        answer: the outcome, pickled, once it is there.
    """

    def __init__(self, runner: "RayRunner", comp: Any, arg: Any, name: str) -> None:
        self._pool, self._runner = runner.pool, runner
        self.comp, self.arg, self.name = comp, arg, name
        self._begun_s = time.monotonic()
        self._team: Sequence[Member] = ()
        self._references: list[Any] = []
        self.answer: asyncio.Future[Any]

    def begin(self, team: Sequence[Member]) -> None:
        """Submit the task, to run on these workers first."""
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
        answer.add_done_callback(self._end)
        self.answer = asyncio.wrap_future(answer)

    def _end(self, answer: "concurrent.futures.Future[Any]") -> None:
        """Give the workers back, and tell the pool of those that are lost."""
        lost: Sequence[outcomes.Attempt] = ()
        if not answer.cancelled() and answer.exception() is None:
            lost = pickle.loads(answer.result()).lost
        self._pool.give_back(self._team, lost)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; return whether it is there.

        Raises:
            Exception: what the task raised.
        """
        done, _ = await asyncio.wait({self.answer}, timeout=timeout_s)
        for answer in done:
            answer.result()
        return bool(done)

    @property
    def values(self) -> list[Any]:
        """References to what it returns."""
        return self._references[1:]

    def outcome(self) -> outcomes.Outcome:
        """Return what came of the task, without values."""
        return pickle.loads(self.answer.result())

    def leave(self) -> None:
        """End what the task still does, for good, and take no note of it.

        Not `ray.cancel`: where that meets the task's answer, Ray 2.60 ends this process
        (a failed check, seen 2026-11-22).
        """
        self._pool.end(self.name)
        if self._references:
            self.answer.add_done_callback(joining.read_error)
        self._pool.job.read_errors(self._references)
        self._references.clear()  # the error that is raised refers to frames with these

    def as_slower(self) -> outcomes.Attempt:
        """Return the attempt that another one overtook."""
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
    """Runs one plan at a time: a subround as a Ray task, a finish as a worker's call.

    Ray repeats a task whose worker died (`WorkerLost`), and one whose own process or
    node died, within the budgets that its attempts count. A finish is attempted from
    here in the same way. A subround that takes far longer than its siblings is
    submitted once more, to an idle worker: the first result counts.

    Args:
        workers: the pool; not owned.
        config: budgets and time limits.
        program: that calls, for Ray's list of tasks.

    Attributes:
        pool: of the workers.
    """

    def __init__(self, workers: Pool, config: Config, program: str) -> None:
        self.pool = workers
        self._config = config
        self._program = program
        self._prefix = uuid.uuid4().hex[:8]
        self._names = itertools.count()

    @override
    async def invoke(self, comp: Any, arg: Any) -> outcomes.Outcome:
        with self.pool.job.watched():
            if isinstance(comp, plans.Finish):
                return await self._finish(comp, arg)
            clients = name_clients(arg)
            first = _Submitted(self, comp, arg, f"{self._prefix}-{next(self._names)}")
            team = await self.pool.take(clients, comp.num_workers)
            try:
                first.begin(team)
                slower: tuple[outcomes.Attempt, ...] = ()
                ended = first
                if self._config.stragglers.enabled:
                    ended, slower = await self._run_with_backup(first)
                else:
                    await first.wait()
            except BaseException as error:  # noqa: BLE001 (what ends a call is told)
                first.leave()
                raise failures.final_error(error) from None
            outcome = ended.outcome()
            self.pool.note_holder(clients, outcome.worker)
            values: list[Any]
            values = list(map(stored.Stored, ended.values, outcome.value_bytes))
            if comp.components_type is not None:
                timeout_s = self._config.subrounds.timeout_s
                values = await subround.bring_home(values, timeout_s)
            elif comp.merge is None or comp.finish is not None:
                answer = self.pool.job.answer
                values = [
                    object_store.decode(await answer(ref)) for ref in ended.values
                ]
            lost = (*outcome.lost, *slower)
            return dataclasses.replace(outcome, values=tuple(values), lost=lost)

    async def _finish(self, comp: plans.Finish, arg: Any) -> outcomes.Outcome:
        """Run a finish; attempts are made from here.

        A task between would take longer than all else that ends a small round.
        """
        name = f"{self._prefix}-{next(self._names)}"
        stays = comp.components_type is not None
        team = await self.pool.take(b"", 1)
        lost: Sequence[outcomes.Attempt] = ()
        try:
            handles, terms = self.terms_of(team)
            work = Work.of(name, terms, comp, arg, _num_values(comp) if stays else 0)
            outcome, values = await _attempt(handles, work, self.pool.job)
            lost = outcome.lost
        except BaseException as error:  # noqa: BLE001 (what ends a call is told)
            self.pool.end(name)
            raise failures.final_error(error) from None
        finally:
            self.pool.give_back(team, lost)
        kept = tuple(values if stays else map(object_store.decode, values))
        return dataclasses.replace(outcome, values=kept)

    async def _run_with_backup(
        self, first: _Submitted
    ) -> tuple[_Submitted, tuple[outcomes.Attempt, ...]]:
        """Wait for a subround, and for a copy of it, too, once it is a straggler.

        Returns:
            What ended first, and the attempt that was slower, if there was one.
        """
        stragglers = self.pool.stragglers
        # The same name by whichever runner: each sibling may have one of its own.
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
        """Return the handles for a subround, its own workers' first, and its terms."""
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
        """Return the task that runs a subround."""
        call = _name_call(comp.draw.invocation)
        name = f"ray_fed subround of {call} of {self._program}"
        retry = self._config.retry
        max_retries = retry.crash + retry.preemption + retry.memory + retry.hang
        return _task(name, 1 + _num_values(comp), max_retries)


async def _attempt(
    handles: list[Any], work: Work, job: Job
) -> tuple[Any, Sequence[Any]]:
    """Make attempts until one ends well, or its budgets are spent."""
    number = 0
    while True:
        with contextlib.suppress(errors.WorkerLost):
            return await Attempt(handles, work, number, job).run()
        number += 1


async def _first_of(
    first: _Submitted, copy: _Submitted
) -> tuple[_Submitted, tuple[outcomes.Attempt, ...]]:
    """Return which of two ends first, and the attempt of the other; that is left.

    Where one is lost for good, the other is waited for.
    """
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
    """Return the task that runs plans with some options, which take time to check."""
    return subround.run_subround.options(
        num_returns=num_returns,
        max_retries=max_retries,
        retry_exceptions=[errors.WorkerLost],
        name=name,
    )


def _name_call(number: int) -> str:
    """Return what to call a call in the name of a task: from a hundred on, roughly.

    Ray keeps some numbers of its own for each name, in each process, for ever.
    """
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
        joining.check_address(address)
        was_connected = ray.is_initialized()
        try:
            self._owns_ray = _connect(address, config, say)
            about = "its own Ray" if self._owns_ray else "joined the Ray"
            self.place = f"{about} at {ray.get_runtime_context().gcs_address}"
            self._program = _name_program()
            group = get_current_placement_group()
            size = pool.decide_size(
                config,
                inventory.live_resources(group),
                may_grow=group is None and not joining.started_here(),
                occupied=None if group is None else inventory.held_resources(),
            )
            if needs_all and size.is_fixed:
                size = dataclasses.replace(size, least=size.most)
            self._job = Job.current()
            self._pool = Pool(config, size, group, self._program, self._job)
        except BaseException:
            if not was_connected:
                ray.shutdown()  # also a Ray that began to start, or one that was joined
            raise
        atexit.register(self.close)

    async def count_workers(self) -> int:
        """Follow the cluster; return how many workers a round has."""
        return await self._pool.count_workers()

    async def await_ready(self, seen: Progress | None) -> Progress:
        """Return how far the workers are, once that is not what was seen before."""
        with self._job.watched():
            return await self._pool.await_ready(seen)

    def runners(self) -> list[RayRunner]:
        """Return what runs subrounds: as many as there may be workers."""
        return [
            RayRunner(self._pool, self._config, self._program)
            for _ in range(self._pool.size.most)
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
            self._pool.forget_clients(tokens)

    def check(self) -> None:
        """Raise unless this process is still connected to the pool's Ray.

        Raises:
            ContextStateError: Ray was shut down, or another one is there.
        """
        self._job.check()

    def sources(self) -> list[HeldWorker]:
        """Return workers of the pool, to be held for as long as it lives.

        As many as it has at least.
        """
        members = self._pool.members[: self._pool.size.least]
        return [HeldWorker(self._pool, m, dict(self._config.retry)) for m in members]

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
                return object_store.decode(
                    await asyncio.wait_for(self._job.answer(reference), timeout_s)
                )
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
        try:
            self._pool.close(ray_ends=self._owns_ray)
        except ray.exceptions.RayError:
            _logger.debug("Ray was gone before the pool was closed.", exc_info=True)
        if self._owns_ray and self._job.is_current:
            ray.shutdown()


def _name_program() -> str:
    """Return what to call the program that this process is of, in Ray's lists."""
    words = sys.argv[:1]
    runtime = ray.get_runtime_context()
    if runtime.worker.mode == ray.WORKER_MODE:  # a task or actor: its job's program
        job: str = runtime.get_job_id()
        jobs = cast("list[dict[str, Any]]", ray_state.jobs())
        entrypoints = (j["Entrypoint"] for j in jobs if j["JobID"] == job)
        words = next(entrypoints, "").split()
    scripts = [pathlib.Path(word) for word in words if word.endswith(".py")]
    if not scripts:
        return "python"
    if scripts[0].name == "ipykernel_launcher.py":
        return "notebook"
    is_module = scripts[0].name == "__main__.py"
    return scripts[0].parent.name if is_module else scripts[0].name


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
        cluster = joining.find(address)
        if cluster is not None:
            say(f"joining {cluster}")
            joining.join(cluster, **options)
            return False
        if address is not None:
            raise joining.missing_error(address)
    # Before Ray takes seconds to start for nothing.
    pool.decide_size(config, [inventory.machine_resources()], may_grow=False)
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
