"""A graph that is loaded: from tensors to tensors, with its random numbers keyed."""

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

import ray_fed.error_texts as error_texts
import ray_fed.tensorflow.graphs.loader as loader
import ray_fed.tensorflow.graphs.randomness as randomness
from ray_fed.plan import diagnostics
from ray_fed.tensorflow.graphs import callbacks, determinism
from ray_fed.tensorflow.graphs.graph_message import GraphDef


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a graph comes from, whatever becomes of it.

    Attributes:
        origin: what an error calls the computation.
        content: the hash of what its graph does, as written; keys its random ops.
        device: name of the device to run on; None leaves it to TensorFlow.
        reads_later: its results are read after the call, when another may have set
            the states of random ops.
        find_place: returns a sentence on the line of the user's that made the node
            which an error's message names, or "".
    """

    origin: str
    content: bytes
    device: str | None
    reads_later: bool
    find_place: Callable[[str], str]


class LoadedGraph:
    """One graph, called with tensors any number of times, from any thread.

    Args:
        graph_def: to load; rewritten in place.
        feeds: names of the tensors to pass, in order.
        fetches: names of the tensors to return, in order.
        initialize_op: to run first on every call.
        source: where the graph comes from.
    """

    def __init__(
        self,
        graph_def: GraphDef,
        feeds: Sequence[str],
        fetches: Sequence[str],
        initialize_op: str | None,
        source: Source,
    ) -> None:
        self._source = source
        determinism.use_deterministic_ops(graph_def)
        self._states = randomness.key_random_ops(graph_def)
        loader.isolate(graph_def, initialize_op)
        self._function: Callable[[list[tf.Tensor]], list[tf.Tensor]]
        with tf.device(source.device):
            self._function = loader.import_function(
                graph_def, list(feeds), list(fetches)
            )
            self._states.create()
        self._notes = self._what_no_key_decides()
        self._one_at_a_time = (
            threading.Lock() if self._states.names else contextlib.nullcontext()
        )
        weakref.finalize(self, self._states.close)

    def _what_no_key_decides(self) -> list[diagnostics.Note]:
        """Return what a call has to note, at most one."""
        ops = [*self._states.unkeyed]
        if self._source.reads_later:
            ops += self._states.in_functions
        if not ops:
            return []
        source = self._source
        return [
            diagnostics.Unkeyed(source.origin, source.content.hex()[:12], tuple(ops))
        ]

    def __call__(self, take: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Return what the graph gives.

        Args:
            take: gives the tensors to pass, on the graph's device.
        """
        source = self._source
        with (
            self._one_at_a_time,
            tf.device(source.device),
            error_texts.naming_origin(source.origin, source.find_place),
        ):
            self._states.set(source.content)
            diagnostics.note(self._notes)
            return callbacks.call(self._function, take())
