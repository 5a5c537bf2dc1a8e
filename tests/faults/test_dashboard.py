"""What a reader of Ray's dashboard, of its logs and of its metrics sees of a good job.

Needs `ray[default]`, which has the dashboard.
"""

import importlib.util
import pathlib
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import ray
from ray._private import worker

import ray_fed
from ray_fed import tensorflow as rtf
from ray_fed.cluster.metrics import RoundMetrics
from ray_fed.observability import events
from ray_fed.plan import outcomes
from tests.observability.subrounds import finished

pytestmark = [
    pytest.mark.ray,
    pytest.mark.faults,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("aiohttp_cors") is None, reason="needs ray[default]"
    ),
]

WAIT_S = 120.0
RUN = "digits"


@rtf.computation(np.float32)
def half(x: Any) -> Any:
    return x / 2


@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def total(values: Any) -> Any:
    return fl.federated_sum(fl.federated_map(half, values))


@pytest.fixture(scope="module", autouse=True)
def _finished_job() -> Iterator[None]:
    """A Ray with a dashboard, on which a context made two rounds and was closed."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=True,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    config = ray_fed.Config(workers=2, progress="off", name=RUN)
    with ray_fed.create_context(config) as context:
        for _ in range(2):
            assert context.invoke(total, [2.0, 4.0, 6.0]) == 6.0
        wait_for(lambda: read_metrics().get("ray_fed_workers_ready") == 2.0)
    yield
    ray.shutdown()


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait for what Ray shows a little later than it happened."""
    ends = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.5)


def read_metrics() -> dict[str, float]:
    """Return ray_fed's numbers, summed over processes, as a scrape of Ray has them."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as reply:
        text = reply.read().decode()
    found: dict[str, float] = {}
    lines = re.compile(r"^(ray_fed_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
    for name, labels, value in lines.findall(text):
        assert f'run="{RUN}"' in labels
        failure = re.search(r'failure="(\w+)"', labels)
        key = f"{name} {failure[1]}" if failure else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


def list_state(kind: str) -> list[Any]:
    """Return Ray's list of tasks or actors."""
    from ray.util import state

    here = ray.get_runtime_context().gcs_address
    return getattr(state, f"list_{kind}")(address=here, limit=1000, detail=True)


def test_no_task_failed() -> None:
    def all_ended() -> bool:
        return all(t.state in {"FINISHED", "FAILED"} for t in list_state("tasks"))

    wait_for(all_ended)

    failed = [task.name for task in list_state("tasks") if task.state == "FAILED"]
    assert failed == []


def test_actors_are_named_by_run_and_worker() -> None:
    actors = list_state("actors")
    labels = {f"ray_fed worker {index} of {RUN}" for index in range(2)}

    assert {actor.repr_name for actor in actors} == labels
    names = [re.fullmatch(r"(.+) \((\w+)\.\d\)", actor.name) for actor in actors]
    assert {name[1] for name in names if name} == labels
    assert len({name[2] for name in names if name}) == 1


def test_placement_group_is_named_by_run() -> None:
    (group,) = list_state("placement_groups")

    assert re.fullmatch(rf"ray_fed workers of {RUN} \(\w+\)", group.name)


def test_tasks_are_named_by_run_and_call() -> None:
    names = {task.name.rpartition(" of ")[0] for task in list_state("tasks")}

    assert {f"ray_fed subround of call {number}" for number in range(2)} <= names


def test_workers_log_their_start() -> None:
    node: Any = cast("Any", worker).global_worker.node
    logs = pathlib.Path(node.get_session_dir_path(), "logs").glob("worker-*.err")
    text = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)

    for index in range(2):
        started = rf"ray_fed worker {index} of {RUN} is ready: node \S+, process \d+"
        assert len(re.findall(started, text)) == 1


def test_scrape_has_what_rounds_cost() -> None:
    sink = RoundMetrics(RUN)  # as a round would tell of what did not happen in the job
    lost = [
        outcomes.Attempt(1, "worker 0", 1, "a", ended=ended)
        for ended in ("crash", "crash", "memory", "slower")
    ]
    sink.on_event(finished(lost=tuple(lost)))
    sink.on_event(events.ClientDropped(0, 0, 1, "ValueError"))

    wait_for(lambda: "ray_fed_dropped_clients_total" in read_metrics())

    found = read_metrics()
    assert found["ray_fed_rounds_total"] == 2
    assert found["ray_fed_round_seconds_count"] == 2
    assert found["ray_fed_round_seconds_sum"] > 0
    assert found["ray_fed_clients_total"] == 6
    assert found["ray_fed_sent_bytes_total"] == 2 * 3 * 4
    assert found["ray_fed_returned_bytes_total"] > 0
    retries = {key: n for key, n in found.items() if "retries" in key}
    assert retries == {
        "ray_fed_retries_total crash": 2,
        "ray_fed_retries_total memory": 1,
    }
    assert found["ray_fed_dropped_clients_total"] == 1
