"""Merges of partials as graphs: the interpreter would make many calls of each."""

import hashlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import ray_fed.blocks as blocks
import ray_fed.plan as plan
import ray_fed.tensorflow.normal as normal
import ray_fed.values as values
from ray_fed.plain import pack
from ray_fed.tensorflow.client_data import UnfitError, flatten
from ray_fed.tensorflow.client_work import parameter_of, specs_of
from ray_fed.tensorflow.grafts import Grafts
from ray_fed.tensorflow.graph_functions import as_graph
from ray_fed.tensorflow.symbolic import Interpreter


class MergeKernel:
    """The graph that merges two partials.

    Args:
        merge: serialised <U, U> -> U.
        device: name of the device to run on; None leaves it to TensorFlow.

    Attributes:
        content: identifies the function.
        has_state: whether it has state or effects.

    Raises:
        UnfitError: it needs what a graph cannot do, or draws.
    """

    def __init__(self, merge: bytes, device: str | None) -> None:
        self.content = hashlib.sha256(merge).digest()
        self.has_state = False
        self._merge = blocks.parse_block(merge)
        self._pair = values.struct_type(parameter_of(self._merge))
        self._device = device
        with tf.device(device):
            self._function = as_graph(self.trace, specs_of(self._pair))

    @property
    def may_be_shared(self) -> bool:
        """Whether several threads may run it at once."""
        return not self.has_state

    def trace(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Return the accumulators of two partials merged, inside of a graph."""
        grafts = Grafts()
        pair = pack(iter(tensors), self._pair)
        merged = Interpreter(grafts).call(self._merge, pair)
        self.has_state |= grafts.has_state
        if grafts.sites:
            raise UnfitError("a merge that draws")
        return flatten(merged)

    def __call__(
        self, left: Sequence[tf.Tensor], right: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Return the accumulators of two partials merged."""
        with tf.device(self._device):
            return self._function([*left, *right])

    def reduce(
        self, partials: Sequence[Any], nodes: Sequence[plan.Node]
    ) -> values.Struct[tf.Tensor]:
        """Return adjacent partials merged along the tree, as tensors in a struct.

        Args:
            partials: plain; at least one.
            nodes: the subtree of each.
        """
        partial = self._pair[0]
        with tf.device(self._device):
            held = [flatten(normal.normalise(given, partial)) for given in partials]
        for left, right in plan.merge_order(nodes):
            held[left] = self(held[left], held[right])
        return pack(iter(held[0]), partial)
