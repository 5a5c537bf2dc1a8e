"""Workers that ask for memory, an accelerator type and labels, on a real cluster."""

import re
from collections.abc import Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import ray
from ray._private import state as ray_state
from ray.cluster_utils import Cluster

import ray_fed
from ray_fed import errors
from ray_fed.cluster import inventory

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(400)]

WORKERS = ray_fed.Workers(
    count=2,
    num_cpus=0.5,
    memory=3 * 2**29,
    accelerator_type="L4",
    label_selector={"zone": "in(b, z)"},
)


@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def total(values: Any) -> Any:
    return fl.federated_sum(values)


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, str]]:
    """The ids of three nodes by their zone. One node has no zone, and only b fits."""
    assert not ray.is_initialized()
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    has: dict[str, Any] = {"num_cpus": 4, "memory": 4 * 2**30}
    has["resources"] = {"accelerator_type:L4": 1}
    try:
        added = {
            "a": cluster.add_node(labels={"zone": "a"}, **has),
            "b": cluster.add_node(labels={"zone": "b"}, **has),
            "": cluster.add_node(num_cpus=4, memory=2**30),
        }
        ray.init(address=cluster.address, log_to_driver=False)
        yield {zone: node.node_id for zone, node in added.items()}
    finally:
        ray.shutdown()
        cluster.shutdown()


@ray.remote(num_cpus=0.1, scheduling_strategy="SPREAD")
def read_node() -> str:
    return ray.get_runtime_context().get_node_id()


@pytest.mark.parametrize(
    "term", ["a", "!a", "in(z, b)", "in(a, b)", "!in(z, b)", "!in(a, b)"]
)
def test_ray_reads_labels_as_the_pool_does(nodes: dict[str, str], term: str) -> None:
    workers = ray_fed.Workers(num_cpus=0.1, label_selector={"zone": term})
    demand = inventory.Demand.of(ray_fed.Config(workers=workers))
    allowed = {
        node
        for zone, node in nodes.items()
        if demand.allows({"zone": zone} if zone else {})
    }

    task = cast("Any", read_node).options(label_selector=dict(demand.labels))
    used = {ref.future().result() for ref in [task.remote() for _ in range(6)]}

    assert used
    assert used <= allowed


def test_pool_counts_room_where_ray_places_workers(nodes: dict[str, str]) -> None:
    del nodes
    demand = inventory.Demand.of(ray_fed.Config(workers=WORKERS))

    assert [n.free for n in inventory.read_nodes(demand)] == [2]
    assert len(inventory.live_resources(demand, None)) == 1
    assert re.fullmatch(  # tasks of other tests may still have CPUs
        r"room for 2 workers on nodes with zone=in\(b,z\): 1 CPU \([\d.]+ of 4 free\),"
        r" 3 GiB memory \(4 of 4 free\), accelerator L4 \(on 1 node\)",
        inventory.describe_need(demand, None, 2),
    )


@pytest.mark.parametrize("count", [2, (2, 2)], ids=["placement group", "range"])
def test_workers_run_on_the_nodes_that_match(nodes: dict[str, str], count: Any) -> None:
    workers = WORKERS.model_copy(update={"count": count})
    config = ray_fed.Config(workers=workers, progress="off")
    with ray_fed.create_context(config, address="auto") as context:
        assert context.invoke(total, [1, 2, 3]) == 6
        actors: Any = cast("Any", ray_state).actors().values()
        places = [
            actor["Address"]["NodeID"]
            for actor in actors
            if actor["ActorClassName"] == "LeafWorker" and actor["State"] == "ALIVE"
        ]

    assert places
    assert set(places) == {nodes["b"]}


def test_more_workers_than_matching_room_are_refused(nodes: dict[str, str]) -> None:
    del nodes
    workers = WORKERS.model_copy(update={"count": 3})

    with pytest.raises(errors.ResourceError, match=r"4\.5 GiB memory .* found 4 GiB"):
        ray_fed.create_context(ray_fed.Config(workers=workers), address="auto")


def test_wait_for_matching_room_says_what_is_missing(nodes: dict[str, str]) -> None:
    del nodes
    update = {"count": (1, 2), "memory": 5 * 2**30, "wait_timeout_s": 1.0}
    config = ray_fed.Config(workers=WORKERS.model_copy(update=update), progress="off")

    with (
        ray_fed.create_context(config, address="auto") as context,
        pytest.raises(errors.ResourceError) as raised,
    ):
        context.invoke(total, [1, 2, 3])

    assert "each with 0.5 CPU, 5 GiB memory, accelerator L4 on nodes with" in str(
        raised.value
    )
    assert "and 1 nodes (0 draining) with room for 0" in str(raised.value)
