"""Where workers can be: nodes, the room that they have, and which of them take none.

Pure, as the pool is: whoever hosts it says what the cluster has.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from typing_extensions import override


@dataclasses.dataclass(frozen=True)
class Node:
    """A node that is alive.

    Attributes:
        name: Ray's id of it.
        address: for errors.
        free: workers that it has room for now, beside what it runs.
        total: workers that it had room for if it ran nothing.
        is_draining: it will go soon.
    """

    name: str
    address: str
    free: int
    total: int
    is_draining: bool = False


class Placement:
    """What is known of the nodes."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._room: dict[str, int] = {}
        self._barred: dict[str, str] = {}
        self._suspects: set[str] = set()

    def survey(self, nodes: Sequence[Node], held: Mapping[str, int]) -> None:
        """Take note of all nodes that are alive.

        Args:
            nodes: in any order.
            held: workers of ours that hold their share of a node already.
        """
        self._nodes = {node.name: node for node in nodes}
        self._room = {
            node.name: min(node.total, node.free + held.get(node.name, 0))
            for node in nodes
        }
        self._barred = {k: v for k, v in self._barred.items() if k in self._nodes}
        self._suspects &= self._nodes.keys()

    @property
    def is_known(self) -> bool:
        """Whether there was a survey."""
        return bool(self._nodes)

    def is_leaving(self, name: str | None) -> bool:
        """Return whether a node is gone, or about to be."""
        if name is None or not self._nodes:
            return False
        return name not in self._nodes or self._nodes[name].is_draining

    def is_draining(self, name: str | None) -> bool:
        """Return whether a node is there and about to go."""
        return name in self._nodes and self._nodes[name].is_draining

    def bar(self, name: str, why: str) -> None:
        """Start no worker on a node any more, for as long as it is there."""
        self._barred[name] = why

    def suspect(self, name: str | None) -> None:
        """Prefer other nodes: a worker was lost on this one."""
        if name is not None:
            self._suspects.add(name)

    def trust(self, name: str) -> None:
        """Prefer other nodes to this one no more."""
        self._suspects.discard(name)

    def choose(self, held: Mapping[str, int]) -> str | None:
        """Return the node for one more worker: where there are fewest; or None.

        Args:
            held: workers of ours on each node, those that start included.
        """
        fitting = [
            name for name in self._open() if self._room[name] > held.get(name, 0)
        ]
        return min(
            fitting,
            key=lambda name: (name in self._suspects, held.get(name, 0)),
            default=None,
        )

    def capacity(self) -> int:
        """Return how many workers the nodes would hold if they ran nothing else."""
        return sum(self._nodes[name].total for name in self._open())

    @property
    def barred(self) -> Mapping[str, str]:
        """Why nodes take no worker."""
        return self._barred

    def _open(self) -> list[str]:
        return [
            name
            for name, node in self._nodes.items()
            if not node.is_draining and name not in self._barred
        ]

    @override
    def __str__(self) -> str:
        """Say what there is, for an error."""
        draining = sum(node.is_draining for node in self._nodes.values())
        room = sum(self._room[name] for name in self._open())
        told = f"{len(self._nodes)} nodes ({draining} draining) with room for {room}"
        if self._barred:
            told += f"; refused: {' '.join(self._barred.values())}"
        return told
