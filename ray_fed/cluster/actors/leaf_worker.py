"""The actor that holds TensorFlow: a leaf stack, and chunks of clients over it."""

import asyncio
import concurrent.futures
import dataclasses
import gc
import logging
import os
from collections.abc import Mapping
from typing import Any, cast

import ray
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.executors.loops as loops
import ray_fed.values.plain_values as plain_values
import ray_fed.worker.stacks as stacks
from ray_fed.cluster import garbage
from ray_fed.cluster.actors.value_scopes import ValueScopes
from ray_fed.cluster.store import object_store
from ray_fed.cluster.store.stored_kernels import FetchedKernels
from ray_fed.cluster.store.stored_sources import fetch
from ray_fed.language import blocks, structs
from ray_fed.plan import diagnostics, random_keys
from ray_fed.plan.diagnostics import Note
from ray_fed.plan.fingerprint import Versions, WorkerDescription
from ray_fed.plan.outcomes import Evaluated
from ray_fed.plan.random_keys import DrawKey
from ray_fed.values import components, read_limits
from ray_fed.worker import evaluation
from ray_fed.worker.evaluation import Executors

_logger = logging.getLogger(__name__)

_YOUNG = 1
"""The generation of what one call makes: stacks, which refer to themselves and to
arrays that the object store may not free before. Collecting it takes no time."""


class LeafWorker:
    """A leaf stack pinned to a process; hosts chunks of clients.

    Values are kept by scope and key; a scope begun again loses the former's. One thread
    runs the work; `ping`, `hold` and `free` have threads of their own, so that they
    answer while it does.

    Nothing but `ping` works before `load` has returned.

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
        self._kernels = FetchedKernels()
        self._limits = limits or read_limits.Limits()
        self._label = label
        self._loop = asyncio.new_event_loop()
        self._scopes = ValueScopes()
        self._left: concurrent.futures.Future[None] = concurrent.futures.Future()

    @override
    def __repr__(self) -> str:
        return self._label

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Return at once: the actor has its place."""

    @ray.method(concurrency_group="control")
    def load(self) -> WorkerDescription | None:
        """Load TensorFlow, and return what this worker is; None where it left before.

        On a thread of its own, as nothing can interrupt an import.
        """
        package = logging.getLogger("ray_fed")
        if not package.hasHandlers():  # the job has not configured the log
            package.addHandler(logging.StreamHandler())
            package.setLevel(logging.INFO)
        threads = concurrent.futures.ThreadPoolExecutor(1)
        loading = threads.submit(self.load_now)
        concurrent.futures.wait(
            [loading, self._left], return_when=concurrent.futures.FIRST_COMPLETED
        )
        if self._left.done():
            return None
        loading.result()
        found = self._describe()
        _logger.info(
            "%s is ready: node %s, process %d, %s",
            *(self._label, found.address, found.pid, found.fingerprint),
        )
        return found

    def load_now(self) -> None:
        """Load TensorFlow on this thread."""
        from ray_fed.tensorflow.tensors import devices

        num_threads, gpu_fraction, client_bytes = self._settings
        device = devices.configure(num_threads, gpu_fraction)
        self._missing = ""
        if gpu_fraction:
            self._missing = devices.describe_missing(_gpus(gpu_fraction))
        self._fingerprint = devices.read_fingerprint(device)
        self._executor = stacks.device_stack(device, client_bytes)

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

    def settle(self) -> None:
        """Return once all work that was begun before has ended."""

    def begin(self, scope: str) -> None:
        """Open a scope, empty; see `ValueScopes.begin`."""
        self._scopes.begin(scope)

    def end(self, scope: str) -> None:
        """Drop the values of a scope whose work is done, after all calls before."""
        self._scopes.end(scope)

    @ray.method(concurrency_group="control")
    def free(self, scope: str, *, for_good: bool = False) -> None:
        """Drop the values of a scope; see `ValueScopes.free`."""
        self._scopes.free(scope, for_good=for_good)

    def _run(self, coroutine: Any, scope: str | None = None) -> Any:
        """Return what a coroutine returns; the end of a scope ends what it reads."""

        def check() -> None:
            if scope is not None:
                self._scopes.check(scope)

        try:
            with read_limits.limited(self._limits), read_limits.checked(check):
                return self._call(coroutine)
        except BaseException:
            garbage.collect_soon()
            raise

    def _call(self, coroutine: Any) -> Any:
        try:
            return loops.run_alone(self._loop, coroutine)
        except errors.ComputationError as error:
            located = error.located(node=ray.util.get_node_ip_address())
            located.cause_text = located.cause_text or error_texts.traceback_of(error)
            raise located from None
        except errors.RayFedError as error:
            raise errors.sendable(error) from error.__cause__
        except Exception as error:  # noqa: BLE001 (whatever TensorFlow raises)
            failure = stacks.describe_failure(error, None)
            raise failure.located(node=ray.util.get_node_ip_address()) from None

    def embed(self, scope: str, key: int, value: Any, type_bytes: bytes | None) -> None:
        """Embed a plain value or a function under a key."""
        type_spec = None if type_bytes is None else blocks.parse_type(type_bytes)
        created = self._run(self._executor.create_value(value, type_spec), scope)
        self._scopes.values(scope)[key] = created

    def embed_stored(self, scope: str, key: int, type_bytes: bytes, held: Any) -> None:
        """Embed an encoded value under a key."""
        self.embed(scope, key, object_store.decode(held), type_bytes)

    def embed_parts(self, scope: str, key: int, type_bytes: bytes, *held: Any) -> None:
        """Embed a value whose parts come one by one, encoded."""
        found = [object_store.decode(part) for part in held]
        value = components.join(found, blocks.parse_type(type_bytes))
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
        held = self._scopes.values(scope)
        argument = None if arg is None else held[arg]
        with random_keys.using(draw), diagnostics.noting() as noted:
            held[key] = self._run(self._executor.create_call(held[function], argument))
        return list(noted)

    def combine(self, scope: str, key: int, elements: list[Any]) -> None:
        """Make a struct of values of the scope."""
        held = self._scopes.values(scope)
        struct = structs.Struct((name, held[member]) for name, member in elements)
        held[key] = self._run(self._executor.create_struct(struct))

    def select(self, scope: str, key: int, source: int, index: int) -> None:
        """Select an element of a struct of the scope."""
        held = self._scopes.values(scope)
        held[key] = self._run(self._executor.create_selection(held[source], index))

    def compute(self, scope: str, key: int) -> Any:
        """Return a value of the scope as a plain value."""
        return self._fetch(self._scopes.values(scope)[key])

    def compute_fused(self, scope: str, key: int) -> Any:
        """Return what the graph of fused work returned, as that says."""
        return self._run(self._scopes.values(scope)[key].compute())

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
        held = self._scopes.values(scope)
        held[key] = [held[source]] * count

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
        held = self._scopes.values(scope)
        embedded = None if function is None else held[function]
        argument = None if arg is None else _chunk_arg(held, arg)
        work = stacks.map_embedded(self._executor, embedded, argument, chunk)
        with random_keys.using(draw), diagnostics.noting() as noted:
            held[key] = self._run(work, scope)
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
        held = self._scopes.values(scope)
        members, zero, accumulate = (held[source] for source in sources)
        first = leaves[0].start
        with random_keys.using(draw), diagnostics.noting() as noted:
            for key, leaf in zip(keys, leaves, strict=True):
                part = members[leaf.start - first : leaf.stop - first]
                work = stacks.accumulate_members(
                    self._executor, zero, part, accumulate, leaf
                )
                held[key] = self._run(work, scope)
        return list(noted)

    def forget_clients(self, tokens: list[str]) -> None:
        """Drop what is kept of clients whose sources are gone."""
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
        *held: Any,
    ) -> list[Any]:
        """Evaluate all of a plan in one call and a scope of its own.

        What no graph can do is interpreted here, as it is on a thread.

        Args:
            scope: open while that runs; freeing it ends the run.
            work: see `object_store.Packed`.
            computation: see `Work`.
            num_sources: how many short lists of `Packed.sources` come first.
            *held: these, and what the other references name.

        Returns:
            What it came to; see `object_store.pack_result`.
        """
        self.begin(scope)
        sources = object_store.gathered(held[:num_sources])
        comp, arg = object_store.unpack_resolved(work, held[num_sources:], sources)
        comp = self._kernels.in_plan(comp)
        # Leaf after leaf: a process that dies has begun as few clients as can be.
        size = comp.clients_per_leaf
        executors = Executors.of_device(self._executor, size, loops.run_in_order)
        with random_keys.using(comp.draw), diagnostics.noting() as noted:
            evaluated = self._run(_evaluate(comp, arg, computation, executors), scope)
        self._scopes.end(scope)
        gc.collect(_YOUNG)
        return object_store.pack_result(evaluated, list(noted))

    def fetch_chunk(self, scope: str, key: int) -> list[Any]:
        """Return the values of a chunk's clients, plain, in order."""
        return [self._fetch(member) for member in self._scopes.values(scope)[key]]


# No method: Ray runs the calls of a class that has a coroutine among its methods on an
# event loop of its own.
async def _evaluate(
    comp: Any, arg: Any, computation: bytes | list[Any] | None, executors: Executors
) -> Evaluated:
    if computation is not None:
        ran = await evaluation.fold(comp, arg, executors)
        if isinstance(ran, Evaluated):
            return ran
        if isinstance(computation, list):
            computation = cast("bytes", fetch(computation[0]))
        comp = dataclasses.replace(comp, kernel=ran, computation=computation)
    return await evaluation.evaluate_plan(comp, arg, executors)


def _gpus(fraction: float) -> str:
    """Return which GPUs Ray gave to this process, in words."""
    ids = ", ".join(map(str, ray.get_gpu_ids()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"Ray gave {fraction:g} of GPU {ids} (CUDA_VISIBLE_DEVICES={visible})"


def _chunk_arg(held: Mapping[int, Any], arg: Any) -> Any:
    if isinstance(arg, int):
        return held[arg]
    return structs.Struct((name, _chunk_arg(held, element)) for name, element in arg)
