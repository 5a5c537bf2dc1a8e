"""What stands for a value that is no tensor any more."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Symbol:
    """A value that only rules understand.

    In a loop or branch it is carried as its `leaves`.

    Attributes:
        moves: whether using it changes it.
    """

    moves = False

    def leaves(self) -> list[tf.Tensor]:
        """Return the tensors that may change."""
        return []

    def shapes(self) -> list[tf.TensorShape]:
        """Return the static shapes that the leaves have at any time."""
        return [leaf.shape for leaf in self.leaves()]

    def with_leaves(self, leaves: Sequence[tf.Tensor]) -> "Symbol":
        """Return this with other tensors; itself where it has none."""
        del leaves
        return self

    def is_like(self, other: Any) -> bool:
        """Return whether the other is this but for its leaves."""
        return other is self


class Opaque(Symbol):
    """A resource of tf.data that nothing lowered needs: a seed generator, a cache."""


@dataclasses.dataclass(frozen=True, eq=False)
class Serialised(Symbol):
    """A sequence bound as the graph of its dataset; undone by DatasetFromGraph."""

    sequence: Symbol
