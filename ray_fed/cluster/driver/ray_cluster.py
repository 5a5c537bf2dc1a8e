"""The cluster as its pool sees it: nodes, workers to start, more nodes to ask for."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ray.util.placement_group import PlacementGroup

from ray_fed.cluster import workers
from ray_fed.cluster.driver import autoscaling, inventory
from ray_fed.cluster.pool.placement import Node
from ray_fed.config import Config


@dataclasses.dataclass(frozen=True)
class RayCluster:
    """What a pool does to the Ray that this process is connected to; see `Cluster`.

    Attributes:
        config: of the pool.
        name: of the pool, unique.
        program: that the pool is of, for Ray's lists and logs.
        group: whose bundles the workers live in; None: anywhere in the cluster.
    """

    config: Config
    name: str
    program: str
    group: PlacementGroup | None = None

    def read_nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        return inventory.read_nodes(resources_of(self.config), self.group)

    def start_worker(self, worker: str, node: str | None) -> Any:
        """Start the actor of one worker, without waiting for it."""
        label = f"ray_fed {worker} of {self.program}"
        return workers.start_worker(self.config, label, node, self.group)

    def request(self, count: int) -> None:
        """Ask for a cluster that holds so many workers; 0: ask for none any more."""
        if self.group is None:  # a group has the bundles that it has
            each = dict(resources_of(self.config))
            autoscaling.request(self.name, [each] * count)

    def describe_need(self, count: int) -> str:
        """Return what so many workers ask for, and what is free of it, in words.

        Empty where there is room for one of them, which is about to have its place.
        """
        if any(node.free for node in self.read_nodes()):
            return ""
        counted = "1 worker" if count == 1 else f"{count} workers"
        needs: list[str] = []
        for name, amount in resources_of(self.config).items():
            free, total = inventory.read_free(name, self.group)
            needs.append(f"{amount * count:g} {name} ({free:g} of {total:g} free)")
        return f"room for {counted}: {', '.join(needs)}"


def resources_of(config: Config) -> Mapping[str, float]:
    """Return what one worker asks for, by Ray's names."""
    wanted = config.workers
    each = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, **wanted.resources}
    return {name: amount for name, amount in each.items() if amount > 0}
