"""Runs each plan over the pool: a subround as a Ray task, a finish from here."""

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import pickle
import threading
import time
import uuid
from typing import Any

import federated_language as fl
import ray
import ray.exceptions
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
from ray_fed.cluster import failures, workers
from ray_fed.cluster.driver.holders import Holders, name_clients
from ray_fed.cluster.driver.kept_leases import KeptLeases
from ray_fed.cluster.jobs import Job, JobActor
from ray_fed.cluster.store import object_store
from ray_fed.cluster.task import driving, leases
from ray_fed.cluster.task.leases import Terms
from ray_fed.cluster.task.work import Work
from ray_fed.config import Config
from ray_fed.language import blocks
from ray_fed.plan import outcomes
from ray_fed.values import components
from ray_fed.values.stored import Stored

_NAMED_CALLS = 100
"""Calls of a context whose tasks have names of their own."""

_LOOK_UP_S = 1.0
"""How often a thread that waits in Ray looks whether its call was cancelled."""


class RayRunner(fl.framework.AsyncContext):
    """Runs one plan at a time; a subround, and what keeps its result, as a Ray task.

    Ray repeats a task whose worker died (`WorkerLost`), and one whose own process or
    node died, within the budgets that the pool counts. A plan whose result stays in the
    store as components is repeated here instead: of what Ray can repeat, it remembers
    how it was made, back to the first of all calls where each takes the former's
    result. A finish whose result is wanted here is one call of a worker, and as often
    repeated from here.

    Args:
        pool: the `PoolHost`; not owned.
        config: budgets and time limits.
        program: that calls, for Ray's list of tasks.
        handles: of the pool's workers, shared with other runners.
        kept: leases of those, shared, too.
        holders: of clients' data, shared, too.
    """

    def __init__(
        self,
        pool: JobActor,
        config: Config,
        program: str,
        handles: leases.Handles,
        kept: KeptLeases,
        holders: Holders,
    ) -> None:
        self._pool = pool
        self._kept = kept
        self._holders = holders
        self._config = config
        self._program = program
        self._prefix = uuid.uuid4().hex[:8]
        self._names = itertools.count()
        self._handles = handles

    @override
    async def invoke(self, comp: Any, arg: Any) -> outcomes.Outcome:
        with self._pool.job.watched():
            return await self._invoke(comp, arg)

    async def _invoke(self, comp: Any, arg: Any) -> outcomes.Outcome:
        begun_s = time.monotonic()
        clients = name_clients(arg) if isinstance(comp, plans.Subround) else b""
        terms = self._terms(comp, self._holders.find(clients))
        with self._kept.running():
            lent = self._kept.take(terms)
            name = f"{self._prefix}-{next(self._names)}" if lent is None else lent.name
            given = None if lent is None else lent.given
            try:
                work = Work.of(name, terms, comp, arg, given)
                driven, results = await self._dispatch(work, comp)
            except BaseException as error:  # noqa: BLE001 (what ends a call is told)
                self._kept.end(name)
                raise failures.final_error(error) from None
        outcome = driven.outcome
        self._holders.note(clients, outcome.worker)
        self._kept.keep(name, terms, begun_s, driven, given)
        if comp.components_type is not None:
            timeout_s = self._config.subrounds.timeout_s
            await _bring_home(results, timeout_s, self._pool.job)
        if comp.components_type is None and not isinstance(comp, plans.Subround):
            held = list(map(object_store.decode, results))
        elif _stays_stored(comp):
            held = list(map(Stored, results, outcome.value_bytes))
        else:
            held = [object_store.decode(await ref) for ref in results]
        return dataclasses.replace(outcome, values=tuple(held))

    @property
    def _max_retries(self) -> int:
        retry = self._config.retry
        return retry.crash + retry.preemption + retry.memory + retry.hang

    def _terms(self, comp: Any, prefers: str) -> Terms:
        timeout_s = self._config.subrounds.timeout_s
        stragglers = self._config.stragglers
        if not isinstance(comp, plans.Subround):
            return Terms(timeout_s, prefers=prefers)
        terms = Terms(timeout_s, prefers=prefers, num_workers=comp.num_workers)
        if not stragglers.enabled:
            return terms
        # The same name by whichever runner: each sibling may have one of its own.
        siblings = f"{comp.draw.invocation}-{hash(comp.computation)}"
        return dataclasses.replace(
            terms, siblings=siblings, spare_after_s=stragglers.min_s
        )

    async def _dispatch(self, work: Work, comp: Any) -> Any:
        """Run a plan; return what it came to, and encoded values or references."""
        if comp.components_type is not None:
            return await self._repeat(work, comp)
        if isinstance(comp, plans.Subround):
            return await self._run(work, comp, self._max_retries)
        return await self._drive(work)

    async def _run(self, work: Work, comp: Any, max_retries: int) -> Any:
        """Run the task of a plan; return what it came to and references to values."""
        kind, number = type(comp).__name__.lower(), comp.draw.invocation
        name = f"ray_fed {kind} of {_name_call(number)} of {self._program}"
        task = _task(name, 1 + _num_values(comp), max_retries)
        refs: list[Any] = task.remote(self._pool.handle, *work.as_arguments())
        try:
            return pickle.loads(await refs[0]), refs[1:]
        except BaseException:
            # Not `ray.cancel`: where that meets the task's answer, Ray 2.60 ends this
            # process (a failed check, seen 2026-11-22). The pool ends what it does.
            while refs:  # the error refers to this frame, which is to hold none
                _read_once_done(refs.pop())
            raise

    async def _drive(self, work: Work) -> Any:
        """Drive a plan from this process; return what it came to and its values."""
        while True:
            try:
                driven, *results = await driving.drive_plan(
                    self._pool, work, self._handles
                )
            except errors.WorkerLost:  # the pool counts these, and has the last word
                work = dataclasses.replace(work, given=None)
                continue
            return driven, results

    async def _repeat(self, work: Work, comp: Any) -> Any:
        """Run the task of a plan until its worker lives to the end."""
        num_lost = 0
        while True:
            try:
                return await self._run(work, comp, 0)
            except ray.exceptions.RayTaskError as error:
                # The pool counts these, and has the last word.
                if not isinstance(failures.unwrap(error), errors.WorkerLost):
                    raise
            except ray.exceptions.RayError as error:
                if not failures.is_loss(error):
                    raise
                num_lost += 1
                if num_lost > self._max_retries:
                    raise
            work = dataclasses.replace(work, given=None)


@functools.lru_cache(maxsize=64)
def _task(name: str, num_returns: int, max_retries: int) -> Any:
    """Return the task that runs plans with some options, which take time to check."""
    return workers.run_plan.options(
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


def _read_once_done(ref: Any) -> None:
    """Read an error, as Ray prints those that nobody read."""
    ref.future().add_done_callback(_read)


def _read(future: concurrent.futures.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _num_values(comp: plans.Subround | plans.Finish) -> int:
    if isinstance(comp, plans.Finish):
        count = 1
    else:
        count = len(comp.leaves) if comp.merge is None else len(comp.subtrees)
        count += comp.num_kept
    if comp.components_type is None:
        return count
    return count * len(
        components.component_types(blocks.parse_type(comp.components_type))
    )


def _stays_stored(comp: plans.Subround | plans.Finish) -> bool:
    is_partial = isinstance(comp, plans.Subround) and comp.merge is not None
    return is_partial or comp.components_type is not None


async def _bring_home(refs: list[Any], timeout_s: float | None, job: Job) -> None:
    """Copy results to the store of this node: what only a worker's holds dies with it.

    Raises:
        DeadlineError: it took longer than `timeout_s`.
    """
    cancelled = threading.Event()

    def wait() -> list[Any]:
        missing, ends = refs, time.monotonic() + (timeout_s or math.inf)
        while missing and not cancelled.is_set() and time.monotonic() < ends:
            job.check()
            _, missing = ray.wait(
                missing, num_returns=len(missing), timeout=_LOOK_UP_S, fetch_local=True
            )
        return missing

    try:
        missing = await asyncio.to_thread(wait)
    except asyncio.CancelledError:
        cancelled.set()
        raise
    if missing:
        raise errors.DeadlineError(
            f"Expected a result on the driver's node within {timeout_s} s"
            f" (`subrounds.timeout_s`), found {len(missing)} of {len(refs)} parts"
            " missing."
        )
