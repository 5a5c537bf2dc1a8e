"""The actor that holds TensorFlow: a leaf stack, and chunks of clients over it.

Ray starts it, places it, and restarts it when its process dies. A process loads
TensorFlow in the background, so that it answers meanwhile, and refuses work until then.
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
from collections.abc import Iterable, Mapping
from typing import Any, cast

import ray
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.executors.loops as loops
import ray_fed.values.plain_values as plain_values
import ray_fed.worker.stacks as stacks
from ray_fed.cluster import object_store
from ray_fed.cluster.object_store import StoredKernel, fetch
from ray_fed.config import Config
from ray_fed.language import blocks, structs
from ray_fed.plan import diagnostics, plans, random_keys
from ray_fed.plan.diagnostics import Note
from ray_fed.plan.fingerprint import Versions, WorkerDescription
from ray_fed.plan.random_keys import DrawKey
from ray_fed.values import components, read_limits
from ray_fed.values.lru_cache import LruCache
from ray_fed.worker import evaluation
from ray_fed.worker.evaluation import Executors

LEFT_S = 1.0
"""Seconds within which Ray has passed on an error."""


def gc_later() -> None:
    """Collect everything, in a while, on a thread that ends then."""
    later = threading.Timer(LEFT_S, gc.collect)
    later.daemon = True
    later.start()


_logger = logging.getLogger(__name__)

_CONTROL_THREADS = 3
"""For `hold`, which keeps one while the worker lives, and for what asks meanwhile."""

_ABANDONED_S = 30.0
"""How long work that nobody waits for may go on before the process ends itself."""

_FETCHED_KERNELS = 16
"""Large kernels that one worker keeps, beside the graphs that it made of them."""

_ENDED_NAMES = 256
"""How many names of ended work a worker remembers, to end what still runs of it."""

YOUNG_GENERATION = 1
"""The generation of what one call or short task makes: stacks, which refer to
themselves and to arrays that the object store may not free before. Collecting it takes
no time."""


class NotLoadedError(errors.ClusterError):
    """A worker whose process is new has not loaded TensorFlow yet."""


class ValueScopes:
    """Embedded values by scope and key; one thread uses them, others may end them.

    A scope is called "NAME/TURN": the turns of one name are attempts at the same work,
    and count upwards.
    """

    def __init__(self) -> None:
        self._scopes: dict[str, dict[int, Any]] = {}
        self._ended: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._ending = threading.Lock()

    def begin(self, scope: str) -> None:
        """Open a scope, empty.

        Raises:
            ClusterError: its turn has ended.
        """
        with self._ending:
            if self.has_ended(scope):
                raise _ended_error(scope)
            self._scopes[scope] = {}

    def values(self, scope: str) -> dict[int, Any]:
        """Return the values of an open scope by key, to be changed.

        Raises:
            ClusterError: it has ended, or never began.
        """
        if scope not in self._scopes:
            raise _ended_error(scope)
        return self._scopes[scope]

    def drop(self, scope: str, keys: Iterable[int]) -> None:
        """Drop values of a scope; those that it has not are ignored."""
        values = self._scopes.get(scope, {})
        for key in keys:
            values.pop(key, None)

    def end(self, scope: str) -> None:
        """Drop the values of a scope whose work is done."""
        self._scopes.pop(scope, None)

    def end_before(self, name: str, turn: int) -> None:
        """Drop the values of earlier turns of a name; work of theirs ends soon.

        So does work of theirs that is yet to come.
        """
        with self._ending:
            self._ended[name] = max(self._ended.pop(name, 0), turn)
            if len(self._ended) > _ENDED_NAMES:
                self._ended.popitem(last=False)
            over = [scope for scope in self._scopes if self.has_ended(scope)]
            dropped = [self._scopes.pop(scope) for scope in over]
        del dropped  # not inside: what is in it may take a while to end

    def has_ended(self, scope: str) -> bool:
        """Return whether the turn of a scope has ended."""
        name, _, turn = scope.rpartition("/")
        return int(turn) < self._ended.get(name, 0)


def _ended_error(scope: str) -> errors.ClusterError:
    return errors.ClusterError(
        f"Expected the scope `{scope}` to be open, found it freed."
    )


class LeafWorker:
    """A leaf stack pinned to a process; hosts chunks of clients.

    Values are kept by scope and key; a scope begun again loses the former's. One thread
    runs the work; `ping`, `hold` and the like have threads of their own, so that they
    answer while it does.

    Args:
        num_threads: of TensorFlow.
        gpu_fraction: of the card that TensorFlow may fill; 0 hides every GPU.
        client_bytes: of clients' data that is kept between rounds.
        limits: of what may be read.
        label: what Ray's lists and logs call this worker and its calls.
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
        self._kernels: LruCache[bytes, plans.Kernel] = LruCache(_FETCHED_KERNELS)
        self._limits = limits or read_limits.Limits()
        self._label = label
        self._loop = asyncio.new_event_loop()
        self._scopes = ValueScopes()
        self._left: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._running: tuple[str, float] | None = None  # scope, since when
        # On a thread of its own, as nothing can interrupt an import.
        self._loading = concurrent.futures.ThreadPoolExecutor(1).submit(self.load_now)

    @override
    def __repr__(self) -> str:
        return self._label

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Return at once: the actor has its place."""

    @ray.method(concurrency_group="control")
    def load(self) -> WorkerDescription | None:
        """Return what this worker is, once it is loaded; None where it left before."""
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
        """Return what this worker is; None where it is not loaded yet."""
        if not self._loading.done():
            return None
        self._loading.result()
        return self._describe()

    @ray.method(concurrency_group="control")
    def running_s(self) -> tuple[str, float]:
        """Return the scope of the work that runs, and for how long; empty for none."""
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
        """Block until the worker is to leave, for whoever waits for its end."""
        self._left.result()

    @ray.method(concurrency_group="control")
    def leave(self) -> None:
        """Have `load` and `hold` return: killed within them, they would have failed."""
        if not self._left.done():
            self._left.set_result(None)

    def begin(self, scope: str) -> None:
        """Open a scope, empty; see `ValueScopes.begin`."""
        self._check_loaded()
        self._scopes.begin(scope)

    def end(self, scope: str) -> None:
        """Drop the values of a scope whose work is done, after all calls before."""
        self._scopes.end(scope)

    @ray.method(concurrency_group="control")
    def end_before(self, name: str, turn: int) -> None:
        """End earlier turns of some work, whatever of it still runs.

        A process that cannot leave such work ends itself, and Ray starts another one.
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
        """Return what a coroutine returns; the end of a scope ends what it reads."""

        def check() -> None:
            if scope is not None:
                self._scopes.values(scope)

        running = self._running
        if running is None and scope is not None:  # a verb
            self._running = scope, time.monotonic()
        node, is_done = ray.util.get_node_ip_address, False
        try:
            with read_limits.limited(self._limits, check):
                result = loops.run_alone(self._loop, coroutine)
        except errors.ComputationError as error:
            located = error.located(node=node())
            located.cause_text = located.cause_text or error_texts.traceback_of(error)
            raise located from None
        except errors.RayFedError as error:
            raise errors.sendable(error) from error.__cause__
        except Exception as error:  # noqa: BLE001 (whatever TensorFlow raises)
            failure = stacks.describe_failure(error, None)
            raise failure.located(node=node()) from None
        else:
            is_done = True
            return result
        finally:
            self._running = running
            if not is_done:
                gc_later()

    def embed(self, scope: str, key: int, value: Any, type_bytes: bytes | None) -> None:
        """Embed a plain value or a function under a key."""
        type_spec = None if type_bytes is None else blocks.parse_type(type_bytes)
        created = self._run(self._executor.create_value(value, type_spec), scope)
        self._scopes.values(scope)[key] = created

    def embed_stored(
        self, scope: str, key: int, type_bytes: bytes, encoded: Any
    ) -> None:
        """Embed an encoded value under a key."""
        self.embed(scope, key, object_store.decode(encoded), type_bytes)

    def embed_parts(self, scope: str, key: int, type_bytes: bytes, *parts: Any) -> None:
        """Embed a value whose parts come one by one, encoded."""
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
        """Call a function; keep the result under a key; return what ran without one."""
        values = self._scopes.values(scope)
        argument = None if arg is None else values[arg]
        with random_keys.using(draw), diagnostics.noting() as noted:
            values[key] = self._run(
                self._executor.create_call(values[function], argument)
            )
        return list(noted)

    def combine(self, scope: str, key: int, elements: list[Any]) -> None:
        """Make a struct of values of the scope."""
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
        """Embed one value a client of a chunk; `bounds` slice a stored cohort.

        `first` is the index of the chunk's first client; `draw`: of reading it.
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
        """Call a function on each client of a chunk, or zip what it would take."""
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
        """Accumulate each leaf of a chunk; keep the partials under keys.

        `sources` are the keys of the chunk, of zero and of the accumulate function;
        `leaves` count clients in the cohort, and the first one begins the chunk.
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
        """Drop what is kept of clients whose sources are gone."""
        if self._loading.done() and self._loading.exception() is None:
            self._executor.clients.forget(tokens)

    def drop(self, scope: str, keys: list[int]) -> None:
        """Drop values of a scope; those that it has not are ignored."""
        self._scopes.drop(scope, keys)

    def evaluate(
        self,
        scope: str,
        work: bytes,
        computation: bytes | list[Any] | None,
        num_sources: int,
        *resolved: Any,
    ) -> list[Any]:
        """Evaluate all of a plan in one call and a scope of its own.

        What no graph can do is interpreted here, as it is on a thread.

        Args:
            scope: open while that runs; its end ends the run.
            work: see `object_store.Packed`.
            computation: see `Work`.
            num_sources: how many short lists of `Packed.sources` come first.
            *resolved: these, and what the other references name.

        Returns:
            What it came to; see `object_store.pack_result`.

        Raises:
            NotLoadedError: this process is new.
        """
        self.begin(scope)
        begun_s = time.monotonic()
        self._running = scope, begun_s
        try:
            sources = object_store.gathered(resolved[:num_sources])
            values = resolved[num_sources:]
            comp, arg = object_store.unpack_resolved(work, values, sources)
            if isinstance(getattr(comp, "kernel", None), StoredKernel):
                reference = comp.kernel.reference
                kernel = self._kernels.get(reference.binary(), lambda: fetch(reference))
                comp = dataclasses.replace(comp, kernel=kernel)
            if computation is not None:
                comp = dataclasses.replace(comp, computation=computation)
            # Leaf after leaf: a process that dies has begun as few clients as can be.
            size = comp.clients_per_leaf
            executors = Executors.of_device(self._executor, size, loops.run_in_order)
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
        """Return the block of a computation, or of one that a list refers to."""
        if isinstance(computation, list):
            computation = cast("bytes", fetch(computation[0]))
        return self._executor.parse(computation)

    def fetch_chunk(self, scope: str, key: int) -> list[Any]:
        """Return the values of a chunk's clients, plain, in order."""
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


def start_worker(config: Config, label: str, strategy: Any) -> Any:
    """Start the actor of one worker with the resources of the configuration.

    Args:
        config: what it asks for.
        label: what Ray's lists and logs are to call it.
        strategy: of Ray, by which it is placed.
    """
    wanted = config.workers
    actor = RemoteWorker.options(
        num_cpus=wanted.num_cpus,
        num_gpus=wanted.num_gpus,
        resources=dict(wanted.resources),
        scheduling_strategy=strategy,
    )
    num_threads = max(1, int(wanted.num_cpus))
    limits = config.worker_limits
    settings = num_threads, wanted.num_gpus, wanted.client_bytes, limits
    return actor.remote(*settings, label)
