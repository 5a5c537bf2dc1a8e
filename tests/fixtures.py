"""Fixtures that several test modules share."""

import gc
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import pytest
import ray
from ray._private import internal_api, worker
from ray._private import state as ray_state

import ray_fed
import ray_fed.worker.stacks as stacks
from ray_fed.cluster.direct import RayExecutorFactory
from ray_fed.cluster.session import Session
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.observability import events
from ray_fed.observability.report import RoundReport
from ray_fed.tensorflow.tensors import devices
from tests.session_contexts import context_over

ContextFactory = Callable[..., ExecutionContext]
StackFor = Callable[..., fl.framework.Executor]
EACH_BACKEND = pytest.mark.parametrize(
    "build", ["local", pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)
"""Runs a test on each backend, with the fixture `build` of `contexts/conftest.py`."""


def report_of(context: ExecutionContext) -> RoundReport:
    """Return the report of a context's latest call. There must have been one."""
    assert context.last_report is not None
    return context.last_report


def run_python(*arguments: str | pathlib.Path, timeout_s: float, **env: str) -> str:
    """Run Python with these arguments in a new process, with more variables `env`.

    Returns its standard output. Raises an error if the process fails, or runs for over
    `timeout_s` seconds.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | env,
    )
    return done.stdout


def run_script(*arguments: str | pathlib.Path, timeout_s: float, **env: str) -> Any:
    """Run Python as `run_python` does; return the JSON value of its last line."""
    printed = run_python(*arguments, timeout_s=timeout_s, **env)
    return json.loads(printed.splitlines()[-1])


def collect_garbage() -> None:
    """Collect all garbage, also if another thread collects garbage at the same time.

    `gc.collect` does nothing while another thread does so, such as a thread of a test
    before whose garbage has finalizers.
    """
    this_thread, begun = threading.get_ident(), list[bool]()

    def note(phase: str, info: dict[str, int]) -> None:
        is_whole = phase == "start" and info["generation"] == 2
        if is_whole and threading.get_ident() == this_thread:
            begun.append(True)

    gc.callbacks.append(note)
    try:
        while not begun:
            gc.collect()
    finally:
        gc.callbacks.remove(note)


class Seen(list[events.Event]):
    """An event sink that is the list of all its events."""

    def on_event(self, event: events.Event) -> None:
        self.append(event)


# Both must happen before any test runs TensorFlow.
devices.set_threads(1)  # as in workers
devices.split_cpu(2)  # as in local contexts of two workers

NUM_CPUS = 16
"""Number of CPUs that Ray assumes. It is enough for kept pools, executor stacks and the
contexts that tests open. Ray warns if there are more processes than CPUs."""

KEPT_WORKERS = 5
"""Maximum number of workers of all kept pools, for example one of two, one of three."""

_logger = logging.getLogger(__name__)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray that all tests of a session share."""
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"idle_worker_killing_time_threshold_ms": 600_000},
    )
    yield
    ray.shutdown()


class RayMemory:
    """Measures how many objects and bytes a test leaves in Ray."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start the measurement: objects that exist now do not count."""
        gc.collect()
        self._references = self.rest(self.num_references)
        self._stored = self.rest(self.stored_bytes)

    def left(self) -> tuple[int, int]:
        """Return the number of new objects, and their bytes.

        This waits for a minute until there are none.
        """
        references = self.settle(self.num_references, self._references)
        stored = self.settle(self.stored_bytes, self._stored)
        return max(0, references - self._references), max(0, stored - self._stored)

    def num_references(self) -> int:
        """Return the number of objects that this process refers to, also by lineage.

        A pool has one running call of each worker. The results of these do not count.
        """
        core: Any = worker.global_worker
        actors = cast("Any", ray_state).actors().values()
        workers = (a["State"] for a in actors if a["ActorClassName"] == "LeafWorker")
        num_followed = sum(state != "DEAD" for state in workers)
        return len(core.core_worker.get_all_reference_counts()) - num_followed

    def stored_bytes(self) -> int:
        """Return the bytes of all objects in the node's object store."""
        (node,) = ray.nodes()
        stats: Any = internal_api.node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"]
        )
        return stats.store_stats.object_store_bytes_used

    def settle(self, measure_now: Callable[[], int], target: int) -> int:
        """Return a measure once it is at most `target`, or after a minute.

        In the second case, this logs all objects in Ray, with their processes.
        """
        deadline = time.monotonic() + 60
        while measure_now() > target:
            if time.monotonic() > deadline:
                here = ray.get_runtime_context().gcs_address  # not another's Ray
                _logger.error(internal_api.memory_summary(here, stats_only=False))
                break
            time.sleep(0.1)  # Ray frees objects with a delay
        return measure_now()

    def rest(self, measure_now: Callable[[], int]) -> int:
        """Return a measure once it has not become lower for two seconds."""
        lowest, since_s = measure_now(), time.monotonic()
        while time.monotonic() < since_s + 2:
            time.sleep(0.1)
            if measure_now() < lowest:
                lowest, since_s = measure_now(), time.monotonic()
        return lowest


@pytest.fixture
def ray_memory(ray_cluster: None) -> RayMemory:
    """A `RayMemory` of the session's Ray, begun after a garbage collection.

    The objects of the test itself must be freed without the garbage collector.
    """
    return RayMemory()


@pytest.fixture(scope="session")
def ray_contexts(ray_cluster: None) -> Iterator[ContextFactory]:
    """A function from settings to a context on the session's Ray.

    A call closes the former context. Contexts with equal workers use the same pool,
    because a pool takes ten seconds to start. The latest pools are kept open.
    """
    kept: list[tuple[ray_fed.Config, Session]] = []
    latest: list[ExecutionContext] = []

    def session_of(base: ray_fed.Config, config: ray_fed.Config) -> Session:
        found = next((pair for pair in kept if pair[0] == base), None)
        if found is None:
            room = KEPT_WORKERS - _count(base)
            while kept and sum(_count(other) for other, _ in kept) > room:
                kept.pop(0)[1].close()
            found = (base, Session(None, config))
        else:
            kept.remove(found)
        kept.append(found)
        return found[1]

    def build(**settings: Any) -> ExecutionContext:
        if latest:
            latest.pop().close()
        config = ray_fed.Config(backend="ray", **settings)
        base = ray_fed.Config(
            workers=config.workers, retry=config.retry, data=config.data
        )
        latest.append(context_over(session_of(base, config), config))
        return latest[0]

    yield build
    for context in latest:
        context.close()
    for _, session in kept:
        session.close()


def _count(config: ray_fed.Config) -> int:
    count = config.workers.count
    assert isinstance(count, int)
    return count


@pytest.fixture(scope="session")
def ray_executors(ray_cluster: None) -> Iterator[RayExecutorFactory]:
    """A factory of executor stacks on two small workers."""
    workers = ray_fed.Workers(count=2, num_cpus=0.5)
    with RayExecutorFactory(ray_fed.Config(workers=workers)) as factory:
        yield factory


@pytest.fixture
def local_contexts() -> Iterator[ContextFactory]:
    """A function from settings to a context on threads, which the fixture closes."""
    contexts: list[ExecutionContext] = []

    def build(**settings: Any) -> ExecutionContext:
        config = ray_fed.Config(backend="local", **settings)
        contexts.append(ray_fed.create_context(config))
        return contexts[-1]

    yield build
    for context in contexts:
        context.close()


@pytest.fixture
def local_stack_for() -> Iterator[StackFor]:
    """A function that builds an executor stack on threads, which the fixture closes."""
    built: list[fl.framework.Executor] = []

    def build(
        num_clients: int, num_leaves: int = 2, clients_per_leaf: int | None = None
    ) -> fl.framework.Executor:
        leaves = stacks.threaded_stacks(num_leaves)
        unplaced = stacks.threaded_stacks(1)[0]
        executor = stacks.local_stack(num_clients, leaves, unplaced, clients_per_leaf)
        built.extend([executor, *leaves])
        return executor

    yield build
    for executor in built:
        executor.close()


@pytest.fixture(autouse=True)
def _no_default_context() -> Iterator[None]:
    """Uninstall the default context after each test."""
    yield
    fl.framework.set_no_default_context()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """The URL of an S3 server in this process. Environment variables lead to it."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    s3fs.S3FileSystem.clear_instance_cache()  # has the address of an earlier server
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield url
    server.stop()


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder on a file system of 64 KiB. Needs the rights to mount."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mounted)]
    if mount is None or os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)
