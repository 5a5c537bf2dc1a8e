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
        group: whose bundles the workers live in; None: anywhere in the cluster.
    """

    config: Config
    name: str
    group: PlacementGroup | None = None

    def read_nodes(self) -> list[Node]:
        """Return the nodes that are alive."""
        return inventory.read_nodes(resources_of(self.config), self.group)

    def start_worker(self, node: str | None) -> Any:
        """Start the actor of one worker, without waiting for it."""
        return workers.start_worker(self.config, node, self.group)

    def request(self, count: int) -> None:
        """Ask for a cluster that holds so many workers; 0: ask for none any more."""
        if self.group is None:  # a group has the bundles that it has
            each = dict(resources_of(self.config))
            autoscaling.request(self.name, [each] * count)


def resources_of(config: Config) -> Mapping[str, float]:
    """Return what one worker asks for, by Ray's names."""
    wanted = config.workers
    each = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, **wanted.resources}
    return {name: amount for name, amount in each.items() if amount > 0}
