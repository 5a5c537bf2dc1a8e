"""What pytest does before and after the tests; their fixtures are in `fixtures`."""

import gc
from typing import Any

import hypothesis
import pytest

gc.disable()  # until pytest_collection_finish below

hypothesis.settings.register_profile("ray_fed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("ray_fed")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Load fixtures, and with them TensorFlow and Ray, where tests run.

    That is not in the process that only hands tests to others, which begin after it.
    """
    gc.collect()
    return RayMemory()


@pytest.fixture(scope="session")
def ray_contexts(ray_cluster: None) -> Iterator[ContextFactory]:
    """Contexts on the session's Ray; those of the same workers share one pool.

    The pool of the latest settings is kept: two would not fit, and one takes ten
    seconds to start.
    """
    kept: list[tuple[ray_fed.Config, Session]] = []
    latest: list[ExecutionContext] = []

    def build(**settings: Any) -> ExecutionContext:
        if latest:
            latest.pop().close()
        config = ray_fed.Config(backend="ray", **settings)
        base = ray_fed.Config(
            workers=config.workers, retry=config.retry, data=config.data
        )
        if kept and kept[0][0] != base:
            kept.pop()[1].close()
        if not kept:
            kept.append((base, Session(None, config)))
        session = kept[0][1]
        backend = Backend(
            session.runners(),
            session.count_workers,
            lambda: None,
            session.store,
            session.fetch,
            session.await_ready,
        )
        latest.append(ExecutionContext(config, backend))
        return latest[0]

    yield build
    for context in latest:
        context.close()
    for _, session in kept:
        session.close()


@pytest.fixture(scope="session", params=[pytest.param(1, marks=pytest.mark.slow), 3, 2])
def num_workers(request: pytest.FixtureRequest) -> int:
    """Sizes of pools; pytest runs the tests of one size together, over one pool."""
    return request.param


@pytest.fixture(scope="session")
def ray_executors(ray_cluster: None) -> Iterator[RayExecutorFactory]:
    """Stacks without subrounds on two workers, small enough beside any other pool."""
    workers = ray_fed.Workers(count=2, num_cpus=0.5)
    with RayExecutorFactory(ray_fed.Config(workers=workers)) as factory:
        yield factory


@pytest.fixture
def local_contexts() -> Iterator[ContextFactory]:
    """Contexts on threads of this process, closed at the end of the test."""
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
    """Builds local stacks, each over leaves on threads of its own."""
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
    """Leave no context installed behind a test."""
    yield
    fl.framework.set_no_default_context()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests on pools of other sizes than two last: two change the pool once."""
    items.sort(key=lambda item: _pool_size(item) != 2)


def _pool_size(item: pytest.Item) -> int:
    callspec: Any = getattr(item, "callspec", None)
    return callspec.params.get("num_workers", 2) if callspec else 2


def pytest_collection_finish() -> None:
    """Collect garbage again, but never search what imports and collection made.

    Those are 570,000 objects that live as long as the tests do; searching them takes
    a third of a second each time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> None:
    """Say how many tests used a real Ray."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports(
        "failed"
    )
    count = sum(
        "ray" in report.keywords and report.when == "call" for report in reports
    )
    terminalreporter.write_line(f"{count} tests used a real Ray")
