"""The Ray actor of one worker, which runs TensorFlow for chunks of clients.

A chunk is a few neighboring clients. Ray starts the actor, places it, and restarts it
when its process dies. A new process loads TensorFlow on a background thread. Until then
it refuses work, and answers only control calls.
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
"""Seconds after which Ray has certainly sent an error to the caller."""


def gc_later() -> None:
    """Collect the garbage of a failed call after `LEFT_S`, on a new thread.

    Until Ray has sent the error, its traceback refers to arrays of the call.
    """
    later = threading.Timer(LEFT_S, gc.collect)
    later.daemon = True
    later.start()


_logger = logging.getLogger(__name__)

_CONTROL_THREADS = 3
"""Number of threads for control calls. The call of `hold` uses one thread for as long
as the worker lives."""

_ABANDONED_S = 30.0
"""Seconds for which work may continue after it was ended. Then the process exits."""

_ENDED_NAMES = 256
"""Number of names of ended work that a worker remembers, to refuse late calls."""

YOUNG_GENERATION = 1
"""Generation of the garbage collector that has the objects of one call or short task.
Its executors are reference cycles with arrays that would stay in the object store.
Collecting this generation takes almost no time."""


class NotLoadedError(errors.ClusterError):
    """The worker's process is new and has not loaded TensorFlow yet."""


class ValueScopes:
    """The values of a worker, by scope and then by key.

    A scope is one attempt at some work. Its name has the form "NAME/TURN", with the
    name of the work and the number of the attempt. When an attempt ends, all its values
    are freed together. One thread uses the values, and any thread may end scopes.
    """

    def __init__(self) -> None:
        self._scopes: dict[str, dict[int, Any]] = {}
        self._ended: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._ending = threading.Lock()

    def begin(self, scope: str) -> None:
        """Open an empty scope, or raise ClusterError if the attempt was ended.

        If the scope is open already, its values are dropped.
        """
        with self._ending:
            if self.has_ended(scope):
                raise _ended_error(scope)
            self._scopes[scope] = {}

    def values(self, scope: str) -> dict[int, Any]:
        """Return an open scope's own dict of values by key, to read and change.

        Raises ClusterError if the scope is not open.
        """
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
        """End all attempts at the work `name` with a number below `turn`.

        Their values are dropped. A running attempt stops when it next uses its scope,
        and an attempt that arrives later is refused.
        """
        with self._ending:
            self._ended[name] = max(self._ended.pop(name, 0), turn)
            if len(self._ended) > _ENDED_NAMES:
                self._ended.popitem(last=False)
            over = [scope for scope in self._scopes if self.has_ended(scope)]
            dropped = [self._scopes.pop(scope) for scope in over]
        del dropped  # outside the lock, because freeing values may take a while

    def has_ended(self, scope: str) -> bool:
        """Return whether `end_before` has ended the attempt of a scope."""
        name, _, turn = scope.rpartition("/")
        return int(turn) < self._ended.get(name, 0)


def _ended_error(scope: str) -> errors.ClusterError:
    return errors.ClusterError(
        f"Expected the scope `{scope}` to be open, found it freed."
    )


class LeafWorker:
    """The class of the worker actor: an executor for one device, with its values.

    Methods store values under a key in a scope (see `ValueScopes`), and take values by
    their keys. One thread runs these methods in the order of the calls. Control calls,
    such as `ping` and `hold`, have threads of their own, so they answer during work.

    Args:
        num_threads: Number of CPU threads for TensorFlow.
        gpu_fraction: Fraction of a GPU's memory that TensorFlow may use. With 0,
            TensorFlow sees no GPU.
        client_bytes: Bytes of clients' data that the worker caches between rounds.
        limits: Limits on reads of data from files and functions of the user.
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
        """Do nothing. An answer shows that Ray has started the actor's process."""

    @ray.method(concurrency_group="control")
    def load(self) -> WorkerDescription | None:
        """Wait until TensorFlow is loaded, and return the worker's description.

        The result is None if `leave` is called first.
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
        """Return the worker's description, or None if TensorFlow still loads."""
        if not self._loading.done():
            return None
        self._loading.result()
        return self._describe()

    @ray.method(concurrency_group="control")
    def running_s(self) -> tuple[str, float]:
        """Return the running work's scope, or "", and its seconds so far."""
        scope, since_s = self._running or ("", time.monotonic())
        return scope, time.monotonic() - since_s

    def load_now(self) -> None:
        """Load TensorFlow, and make the executor of this worker's device."""
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
        """Block until `leave` is called, so that the pool notices a process's death."""
        self._left.result()

    @ray.method(concurrency_group="control")
    def leave(self) -> None:
        """Make `load` and `hold` return, before the pool kills the worker."""
        if not self._left.done():
            self._left.set_result(None)

    def begin(self, scope: str) -> None:
        """Open an empty scope, see `ValueScopes.begin`.

        Raises NotLoadedError in a new process.
        """
        self._check_loaded()
        self._frozen = []
        self._scopes.begin(scope)

    def end(self, scope: str) -> None:
        """Drop the values of a scope whose work is done."""
        self._scopes.end(scope)

    @ray.method(concurrency_group="control")
    def end_before(self, name: str, turn: int) -> None:
        """End attempts at some work, see `ValueScopes.end_before`.

        If a running attempt does not stop within `_ABANDONED_S`, this process exits,
        and Ray starts another.
        """
        self._scopes.end_before(name, turn)
        running = self._running
        if running is not None and self._scopes.has_ended(running[0]):
            timer = threading.Timer(_ABANDONED_S, self._leave_abandoned, [running])
            timer.daemon = True
            timer.start()

    def _leave_abandoned(self, running: tuple[str, float]) -> None:
        if self._running == running:
            _logger.warning("%s still runs work that was ended: exiting", self._label)
            os._exit(1)

    def _check_loaded(self) -> None:
        if not self._loading.done():
            raise NotLoadedError(f"Expected `{self._label}` loaded, found it loading.")
        self._loading.result()

    def _run(self, coroutine: Any, scope: str | None = None) -> Any:
        # If the scope ends meanwhile, the next read of clients' data raises an error.
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
        """Embed a plain value, or a function and its frozen arrays, under a key.

        `type_bytes` is the value's serialized type, or None for a function. `arrays`
        has the names of the frozen arrays, with references.
        """
        self._frozen += object_store.fetch_arrays(arrays)
        type_spec = None if type_bytes is None else blocks.parse_type(type_bytes)
        created = self._run(self._executor.create_value(value, type_spec), scope)
        self._scopes.values(scope)[key] = created

    def embed_stored(
        self, scope: str, key: int, type_bytes: bytes, encoded: Any
    ) -> None:
        """Embed, under a key, a value that `object_store.encode` has encoded."""
        self.embed(scope, key, object_store.decode(encoded), type_bytes)

    def embed_parts(self, scope: str, key: int, type_bytes: bytes, *parts: Any) -> None:
        """Embed, under a key, the value whose encoded components are `parts`."""
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
        """Call a function, and store the result under a key. Return the call's notes.

        `function` and `arg` are keys. `draw` is the key of the call's random numbers.
        """
        values = self._scopes.values(scope)
        argument = None if arg is None else values[arg]
        with random_keys.using(draw), diagnostics.noting() as noted:
            values[key] = self._run(
                self._executor.create_call(values[function], argument)
            )
        return list(noted)

    def combine(self, scope: str, key: int, elements: list[Any]) -> None:
        """Make a struct of values under a key. `elements` has (name, key) pairs."""
        values = self._scopes.values(scope)
        struct = structs.Struct((name, values[member]) for name, member in elements)
        values[key] = self._run(self._executor.create_struct(struct))

    def select(self, scope: str, key: int, source: int, index: int) -> None:
        """Store element `index` of the struct at key `source` under `key`."""
        values = self._scopes.values(scope)
        values[key] = self._run(self._executor.create_selection(values[source], index))

    def compute(self, scope: str, key: int) -> Any:
        """Return the value under a key as a plain value (NumPy arrays in tuples)."""
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
        """Embed the values of a chunk's clients as a list under one key.

        `members` are the values. If `bounds` has a start and a stop, `members` is an
        encoded list with the values of all clients, and the chunk is this slice.
        `first` is the index of the chunk's first client in the cohort.
        """
        if bounds is not None:
            members = object_store.decode(members)[bounds[0] : bounds[1]]
        member = blocks.parse_type(type_bytes)
        work = stacks.embed_members(self._executor, members, member, first)
        with random_keys.using(draw):
            self._scopes.values(scope)[key] = self._run(work, scope)

    def repeat(self, scope: str, key: int, source: int, count: int) -> None:
        """Make a chunk of `count` clients that all have the value at key `source`."""
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
        """Call a function for each client of a chunk, and store the results as a chunk.

        `function` is a key. With None, the result is each client's argument. `arg` is
        the key of a chunk, or (name, arg) pairs for a struct of chunks. `chunk` has the
        clients' indices in the cohort.
        """
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
        """Accumulate each leaf of a chunk, and store one partial result under each key.

        `sources` has three keys: of the chunk, of the accumulator's initial value, and
        of the function that adds a client's value to an accumulator. `leaves` are
        ranges of client indices in the cohort. The first is the chunk's beginning.
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
        """Drop the cached data of the client sources with these tokens."""
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
        """Evaluate a whole plan in one call, and return the list of `pack_result`.

        `work` is `Packed.work`. `resolved` has `num_sources` short lists of
        `Packed.sources`, and then the encoded values of `Packed.values`. This opens the
        scope and closes it. If the scope ends before, the plan stops. Raises
        NotLoadedError in a new process.
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
            # Leaf after leaf, so that a death of the process loses the fewest clients.
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

    `name` is the actor's unique name. `label` names the worker in Ray's logs.
    `strategy` is Ray's scheduling strategy. The result is the actor's handle.
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
