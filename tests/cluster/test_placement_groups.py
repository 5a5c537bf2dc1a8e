"""A context in a task that lives in a placement group, as a trial of Ray Tune does."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def group(ray_cluster: None) -> Iterator[PlacementGroup]:
    found = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    assert found.wait(60)
    yield found
    ray.util.remove_placement_group(found)


def run_inside(group: PlacementGroup, work: Any) -> Any:
    """Return what a function returns that runs in the first bundle of a group."""
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    task: Any = ray.remote(num_cpus=1, scheduling_strategy=strategy)(work)
    return task.remote().future().result()


def test_workers_live_in_the_bundles_that_are_left(group: PlacementGroup) -> None:
    def work() -> Any:
        import federated_language as fl
        import numpy as np

        import ray_fed
        from ray_fed.cluster import inventory

        @fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
        def total(clients: Any) -> Any:
            return fl.federated_sum(clients)

        here = ray.util.get_current_placement_group()
        config, found = ray_fed.Config(progress="off"), []
        one_cpu = inventory.Demand({"CPU": 1.0})
        for _ in range(2):  # the second finds room as soon as the first has left
            with ray_fed.create_context(config) as context:
                found.append(int(context.invoke(total, [1, 2, 3])))
                free = sum(n.free for n in inventory.read_nodes(one_cpu, here))
                assert context.last_report is not None
                found += [free, len({s.worker for s in context.last_report.subrounds})]
        return found

    assert run_inside(group, work) == [6, 0, 1] * 2


def test_more_workers_than_bundles_are_refused_early(group: PlacementGroup) -> None:
    def work() -> str:
        import ray_fed

        try:
            ray_fed.create_context(ray_fed.Config(workers=2, progress="off"))
        except ray_fed.errors.ResourceError as error:
            return str(error)
        return ""

    assert "ask for 3 bundles, the first for the process" in run_inside(group, work)
