"""The actor that runs TensorFlow: a leaf stack with chunks of clients.

Ray starts it, places it, and restarts it when its process dies. A new process loads
TensorFlow on a background thread. Until then it answers other calls, but refuses work.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import gc
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import ray
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
import ray_fed.worker.stacks as stacks
from ray_fed.cluster import object_store
from ray_fed.config import Config
from ray_fed.executors.calling_thread import run_alone
from ray_fed.executors.fan_out import run_in_order
from ray_fed.language import blocks, structs
from ray_fed.plan import diagnostics, random_keys
from ray_fed.plan.diagnostics import Note
from ray_fed.plan.fingerprint import Versions, WorkerDescription
from ray_fed.plan.random_keys import DrawKey
from ray_fed.values import components, read_limits
from ray_fed.values.frozen_arrays import FrozenArray
from ray_fed.worker import evaluation
from ray_fed.worker.evaluation import Executors

LEFT_S = 1.0
"""Seconds after which Ray has passed on an error."""


def gc_later() -> None:
    """Run the garbage collector after `LEFT_S`, on a thread of its own."""
    later = threading.Timer(LEFT_S, gc.collect)
    later.daemon = True
    later.start()


_logger = logging.getLogger(__name__)

_CONTROL_THREADS = 3
"""Number of threads for control calls. `hold` uses one for as long as the worker
lives."""

_ABANDONED_S = 30.0
"""Seconds that ended work may go on before the process ends itself."""

_ENDED_NAMES = 256
"""Number of names of ended work that a worker remembers, to end calls that come
later."""

YOUNG_GENERATION = 1
"""Generation of the garbage collector that has the objects of one call or short task.
These are stacks that refer to themselves, and to arrays that would stay in the object
store. Collecting this generation takes almost no time."""


class NotLoadedError(errors.ClusterError):
    """The worker's process is new and has not loaded TensorFlow yet."""


class ValueScopes:
    """Embedded values by scope and key.

    One thread uses them, and others may end them.

    The name of a scope has the form "NAME/TURN". The turns of one name are attempts at
    the same work, and count upwards.
    """

    def __init__(self) -> None:
        self._scopes: dict[str, dict[int, Any]] = {}
        self._ended: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._ending = threading.Lock()

    def begin(self, scope: str) -> None:
        """Open an empty scope, or raise ClusterError if its turn has ended.

        Earlier values of an open scope with this name are dropped.
        """
        with self._ending:
            if self.has_ended(scope):
                raise _ended_error(scope)
            self._scopes[scope] = {}

    def values(self, scope: str) -> dict[int, Any]:
        """Return the values of an open scope by key. The caller may change the dict."""
        if scope not in self._scopes:
            raise _ended_error(scope)
        return self._scopes[scope]

    def drop(self, scope: str, keys: Iterable[int]) -> None:
        """Drop values of a scope. Unknown keys are ignored."""
        values = self._scopes.get(scope, {})
        for key in keys:
            values.pop(key, None)

    def end(self, scope: str) -> None:
        """Drop the values of a scope whose work is done."""
        self._scopes.pop(scope, None)

    def end_before(self, name: str, turn: int) -> None:
        """Drop the values of earlier turns of a name.

        Running work of these turns stops when it next checks its scope. Work that
        arrives later is refused.
        """
        with self._ending:
            self._ended[name] = max(self._ended.pop(name, 0), turn)
            if len(self._ended) > _ENDED_NAMES:
                self._ended.popitem(last=False)
            over = [scope for scope in self._scopes if self.has_ended(scope)]
            dropped = [self._scopes.pop(scope) for scope in over]
        del dropped  # outside the lock, because freeing values may take a while

    def has_ended(self, scope: str) -> bool:
        """Return whether the turn of a scope has ended."""
        name, _, turn = scope.rpartition("/")
        return int(turn) < self._ended.get(name, 0)


def _ended_error(scope: str) -> errors.ClusterError:
    return errors.ClusterError(
        f"Expected the scope `{scope}` to be open, found it freed."
    )


class LeafWorker:
    """The class of the worker actor.

    It has a leaf stack, and values of clients.

    Values are stored by scope and key. One thread runs the work. Control calls such as
    `ping` and `hold` have threads of their own, so they answer during work.

    Args:
        gpu_fraction: Fraction of a GPU's memory that TensorFlow may fill. With 0, it
            sees no GPU.
        client_bytes: Bytes of clients' data that the worker caches between rounds.
        label: Name of this worker and its calls in Ray's lists and logs.
    """

    def __init__(
        self,
        num_threads: int,
        gpu_fraction: float,
        client_bytes: int,
        limits: read_limits.Limits | None = None,
        label: str = "ray_fed worker",
    ) -> None:
        self._settings = num_threads, gpu_fraction, client_bytes
        self._limits = limits or read_limits.Limits()
        self._label = label
        self._loop = asyncio.new_event_loop()
        self._scopes = ValueScopes()
        self._left: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._running: tuple[str, float] | None = None  # scope, since when
        self._frozen: list[FrozenArray] = []  # arrays that graphs may load
        # On a thread of its own, because an import cannot be interrupted.
        self._loading = concurrent.futures.ThreadPoolExecutor(1).submit(self.load_now)

    @override
    def __repr__(self) -> str:
        return self._label

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Return at once. An answer shows that the actor has its place."""

    @ray.method(concurrency_group="control")
    def load(self) -> WorkerDescription | None:
        """Return the worker's description once it is loaded.

        It is None if the worker was asked to leave first.
        """
        package = logging.getLogger("ray_fed")
        if not package.hasHandlers():  # the job has not configured the log
            package.addHandler(logging.StreamHandler())
            package.setLevel(logging.INFO)
        concurrent.futures.wait(
            [self._loading, self._left],
            return_when=concurrent.futures.FIRST_COMPLETED,
        )
        if self._left.done():
            return None
        self._loading.result()
        described = self._describe()
        _logger.info(
            "%s is ready: node %s, process %d, %s",
            *(self._label, described.address, described.pid, described.fingerprint),
        )
        return described

    @ray.method(concurrency_group="control")
    def describe(self) -> WorkerDescription | None:
        """Return the worker's description, or None if it is not loaded yet."""
        if not self._loading.done():
            return None
        self._loading.result()
        return self._describe()

    @ray.method(concurrency_group="control")
    def running_s(self) -> tuple[str, float]:
        """Return the scope of the running work, or "", and its seconds so far."""
        scope, since_s = self._running or ("", time.monotonic())
        return scope, time.monotonic() - since_s

    def load_now(self) -> None:
        """Load TensorFlow on this thread."""
        from ray_fed.tensorflow.tensors import devices

        num_threads, gpu_fraction, client_bytes = self._settings
        device = devices.configure(num_threads, gpu_fraction)
        self._missing = ""
        if gpu_fraction:
            ids = ", ".join(map(str, ray.get_gpu_ids()))
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            self._missing = devices.describe_missing(
                f"Ray gave {gpu_fraction:g} of GPU {ids}"
                f" (CUDA_VISIBLE_DEVICES={visible})"
            )
        self._fingerprint = devices.read_fingerprint(device)
        self._executor = stacks.device_stack(device, client_bytes)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (one worker a process)
    def _describe(self) -> WorkerDescription:
        return WorkerDescription(
            os.getpid(),
            ray.util.get_node_ip_address(),
            ray.get_runtime_context().get_node_id(),
            Versions.read(),
            self._fingerprint,
            self._missing,
        )

    @ray.method(concurrency_group="control")
    def hold(self) -> None:
        """Block until `leave` is called. The pool waits for the end of this call."""
        self._left.result()

    @ray.method(concurrency_group="control")
    def leave(self) -> None:
        """Make `load` and `hold` return. They would fail if the worker were killed."""
        if not self._left.done():
            self._left.set_result(None)

    def begin(self, scope: str) -> None:
        """Open an empty scope, see `ValueScopes.begin`."""
        self._check_loaded()
        self._frozen = []
        self._scopes.begin(scope)

    def end(self, scope: str) -> None:
        """Drop the values of a scope whose work is done, after all earlier calls."""
        self._scopes.end(scope)

    @ray.method(concurrency_group="control")
    def end_before(self, name: str, turn: int) -> None:
        """End earlier attempts (turns) at some work, also one that still runs.

        If the work does not stop within `_ABANDONED_S`, the process ends itself, and
        Ray starts another one.
        """
        self._scopes.end_before(name, turn)
        running = self._running
        if running is not None and self._scopes.has_ended(running[0]):
            timer = threading.Timer(_ABANDONED_S, self._leave_abandoned, [running])
            timer.daemon = True
            timer.start()

    def _leave_abandoned(self, running: tuple[str, float]) -> None:
        if self._running == running:
            _logger.warning("%s cannot leave work that ended: it exits", self._label)
            os._exit(1)

    def _check_loaded(self) -> None:
        if not self._loading.done():
            raise NotLoadedError(f"Expected `{self._label}` loaded, found it loading.")
        self._loading.result()

    def _run(self, coroutine: Any, scope: str | None = None) -> Any:
        """Run a coroutine, and return its result.

        If `scope` ends meanwhile, the next read of data raises an error.
        """

        def check() -> None:
            if scope is not None:
                self._scopes.values(scope)

        running = self._running
        if running is None and scope is not None:  # a call other than `evaluate`
            self._running = scope, time.monotonic()
        node, is_done = ray.util.get_node_ip_address, False
        try:
            with read_limits.limited(self._limits, check):
                result = run_alone(self._loop, coroutine)
        except errors.ComputationError as error:
            located = error.located(node=node())
            located.cause_text = located.cause_text or error_texts.traceback_of(error)
            raise located from None
        except errors.RayFedError as error:
            raise errors.sendable(error) from error.__cause__
        except Exception as error:  # noqa: BLE001 (TensorFlow may raise any class)
            failure = stacks.describe_failure(error, None)
            raise failure.located(node=node()) from None
        else:
            is_done = True
            return result
        finally:
            self._running = running
            if not is_done:
                gc_later()

    def embed(
        self,
        scope: str,
        key: int,
        value: Any,
        type_bytes: bytes | None,
        arrays: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Embed a plain value, or a function with its frozen arrays, under a key."""
        self._frozen += object_store.fetch_arrays(arrays)
        type_spec = None if type_bytes is None else blocks.parse_type(type_bytes)
        created = self._run(self._executor.create_value(value, type_spec), scope)
        self._scopes.values(scope)[key] = created

    def embed_stored(
        self, scope: str, key: int, type_bytes: bytes, encoded: Any
    ) -> None:
        """Embed an encoded value under a key."""
        self.embed(scope, key, object_store.decode(encoded), type_bytes)

    def embed_parts(self, scope: str, key: int, type_bytes: bytes, *parts: Any) -> None:
        """Embed a value under a key. Its encoded components are `parts`."""
        decoded = [object_store.decode(part) for part in parts]
        value = components.join(decoded, blocks.parse_type(type_bytes))
        self.embed(scope, key, value, type_bytes)

    def invoke(
        self,
        scope: str,
        key: int,
        function: int,
        arg: int | None,
        draw: DrawKey | None,
    ) -> list[Note]:
        """Call a function, and keep the result under a key. Return the call's notes."""
        values = self._scopes.values(scope)
        argument = None if arg is None else values[arg]
        with random_keys.using(draw), diagnostics.noting() as noted:
            values[key] = self._run(
                self._executor.create_call(values[function], argument)
            )
        return list(noted)

    def combine(self, scope: str, key: int, elements: list[Any]) -> None:
        """Make a struct of values of the scope. `elements` are (name, key) pairs."""
        values = self._scopes.values(scope)
        struct = structs.Struct((name, values[member]) for name, member in elements)
        values[key] = self._run(self._executor.create_struct(struct))

    def select(self, scope: str, key: int, source: int, index: int) -> None:
        """Select an element of a struct of the scope."""
        values = self._scopes.values(scope)
        values[key] = self._run(self._executor.create_selection(values[source], index))

    def compute(self, scope: str, key: int) -> Any:
        """Return a value of the scope as a plain value."""
        return self._fetch(self._scopes.values(scope)[key])

    def _fetch(self, value: Any) -> Any:
        computed = self._run(value.compute())
        return plain_values.to_plain(computed, value.type_signature, "a result")

    def place(
        self,
        scope: str,
        key: int,
        members: Any,
        bounds: tuple[int, int] | None,
        type_bytes: bytes,
        first: int,
        draw: DrawKey | None = None,
    ) -> None:
        """Embed one value for each client of a chunk, under one key.

        `members` are the chunk's values, or an encoded list of the whole cohort.
        `bounds` then has the start and stop of the chunk in the list. `first` is the
        index of the chunk's first client in the cohort.
        """
        if bounds is not None:
            members = object_store.decode(members)[bounds[0] : bounds[1]]
        member = blocks.parse_type(type_bytes)
        work = stacks.embed_members(self._executor, members, member, first)
        with random_keys.using(draw):
            self._scopes.values(scope)[key] = self._run(work, scope)

    def repeat(self, scope: str, key: int, source: int, count: int) -> None:
        """Make a chunk whose clients all hold the same value."""
        values = self._scopes.values(scope)
        values[key] = [values[source]] * count

    def map(
        self,
        scope: str,
        key: int,
        function: int | None,
        arg: Any,
        chunk: range,
        draw: DrawKey | None,
    ) -> list[Note]:
        """Call a function on each client of a chunk. Without one, zip the arguments."""
        values = self._scopes.values(scope)
        embedded = None if function is None else values[function]
        argument = None if arg is None else _chunk_arg(values, arg)
        work = stacks.map_embedded(self._executor, embedded, argument, chunk)
        with random_keys.using(draw), diagnostics.noting() as noted:
            values[key] = self._run(work, scope)
        return list(noted)

    def reduce(
        self,
        scope: str,
        keys: list[int],
        sources: list[int],
        leaves: list[range],
        draw: DrawKey | None,
    ) -> list[Note]:
        """Accumulate each leaf of a chunk, and store one partial under each key.

        `sources` are the keys of the chunk, of zero, and of the accumulate function.
        Leaves are ranges of indices in the cohort, and the chunk begins with the first
        leaf.
        """
        values = self._scopes.values(scope)
        members, zero, accumulate = (values[source] for source in sources)
        first = leaves[0].start
        with random_keys.using(draw), diagnostics.noting() as noted:
            for key, leaf in zip(keys, leaves, strict=True):
                part = members[leaf.start - first : leaf.stop - first]
                work = stacks.accumulate_members(
                    self._executor, zero, part, accumulate, leaf
                )
                values[key] = self._run(work, scope)
        return list(noted)

    def forget_clients(self, tokens: list[str]) -> None:
        """Drop the cached data of clients whose sources are gone."""
        if self._loading.done() and self._loading.exception() is None:
            self._executor.clients.forget(tokens)

    def drop(self, scope: str, keys: list[int]) -> None:
        """Drop values of a scope. Unknown keys are ignored."""
        self._scopes.drop(scope, keys)

    def evaluate(
        self,
        scope: str,
        work: bytes,
        num_sources: int,
        *resolved: Any,
    ) -> list[Any]:
        """Evaluate a whole plan in one call, in its own scope, and pack the outcome.

        Work that no graph can do is interpreted in this process. If the scope ends, the
        plan stops. `resolved` has `num_sources` short lists of `Packed.sources`,
        followed by the values of `Packed.values`. Raises NotLoadedError in a new
        process.
        """
        self.begin(scope)
        begun_s = time.monotonic()
        self._running = scope, begun_s
        try:
            sources = object_store.gathered(resolved[:num_sources])
            values = resolved[num_sources:]
            comp, arg = object_store.unpack_resolved(work, values, sources)
            self._frozen += object_store.fetch_arrays(comp.arrays)
            comp = object_store.restore_functions(comp)
            # Leaf after leaf, so that a process that dies loses the fewest clients.
            size = comp.clients_per_leaf
            executors = Executors.of_device(self._executor, size, run_in_order)
            executors = dataclasses.replace(executors, parse=self._parse)
            with diagnostics.noting() as noted:
                evaluating = evaluation.evaluate_plan(comp, arg, executors)
                evaluated = self._run(evaluating, scope)
            evaluated = dataclasses.replace(
                evaluated, busy_s=time.monotonic() - begun_s
            )
            self._scopes.end(scope)
            gc.collect(YOUNG_GENERATION)
            return object_store.pack_result(evaluated, list(noted), self._describe())
        finally:
            self._running = None

    def _parse(self, computation: bytes | list[Any]) -> Any:
        """Return the block of a computation, see `object_store.read_computation`."""
        return self._executor.parse(object_store.read_computation(computation))

    def fetch_chunk(self, scope: str, key: int) -> list[Any]:
        """Return the plain values of a chunk's clients, in order."""
        return [self._fetch(member) for member in self._scopes.values(scope)[key]]


def _chunk_arg(values: Mapping[int, Any], arg: Any) -> Any:
    if isinstance(arg, int):
        return values[arg]
    return structs.Struct((name, _chunk_arg(values, element)) for name, element in arg)


RemoteWorker: Any = cast("Any", ray.remote)(
    concurrency_groups={"control": _CONTROL_THREADS},
    max_restarts=-1,
    max_task_retries=0,
)(LeafWorker)


def start_worker(config: Config, label: str, name: str, strategy: Any) -> Any:
    """Start the actor of one worker with the resources of the configuration.

    `name` is unique in Ray's lists. `label` names the worker and its calls in Ray's
    logs. `strategy` is Ray's scheduling strategy.
    """
    wanted = config.workers
    actor = RemoteWorker.options(
        name=name,
        num_cpus=wanted.num_cpus,
        num_gpus=wanted.num_gpus,
        memory=wanted.memory or None,
        accelerator_type=wanted.accelerator_type,
        resources=dict(wanted.resources),
        label_selector=dict(wanted.label_selector) or None,
        scheduling_strategy=strategy,
    )
    num_threads = max(1, int(wanted.num_cpus))
    limits = config.worker_limits
    settings = num_threads, wanted.num_gpus, wanted.client_bytes, limits
    return actor.remote(*settings, label)
