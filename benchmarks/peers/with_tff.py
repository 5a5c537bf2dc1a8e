"""Rounds of TensorFlow Federated: its C++ runtime, `build_weighted_fed_avg`.

Clients are lists of datasets, or numbers of which each client makes its own dataset.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from benchmarks.networks import LOGITS
from benchmarks.peers.turns import Task


def _build_process(task: Task, spec: Any) -> Any:
    """Return federated averaging of a functional model with the faster of its loops."""
    logits = LOGITS[task.workload]

    @tf.function
    def predict(weights: Any, x: Any, training: Any) -> Any:  # noqa: ARG001 (theirs)
        return logits(weights[0], x)

    @tf.function
    def loss(output: Any, label: Any, sample_weight: Any = None) -> Any:  # noqa: ARG001
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, output)
        return tf.reduce_mean(losses)

    model = tff.learning.models.FunctionalModel(
        initial_weights=(tuple(task.initial()), ()),
        predict_on_batch_fn=predict,
        loss_fn=loss,
        input_spec=spec,
    )
    return tff.learning.algorithms.build_weighted_fed_avg(
        model,
        tff.learning.optimizers.build_sgdm(0.1),
        tff.learning.optimizers.build_sgdm(1.0),
        loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR,
    )


def _read_on_worker(task: Task, x: Any, y: Any) -> Any:
    """Write each client's arrays to files; return a dataset of a client's number."""
    for index in range(len(x)):
        (task.folder / f"{index}.x").write_bytes(x[index].tobytes())
        (task.folder / f"{index}.y").write_bytes(y[index].tobytes())
    shapes = x.shape[1:], y.shape[1:]

    @tff.tensorflow.computation(np.int32)
    def read(index: Any) -> Any:
        start = tf.strings.join([f"{task.folder}/", tf.strings.as_string(index)])
        read_x, read_y = (
            tf.reshape(tf.io.decode_raw(tf.io.read_file(start + suffix), kind), shape)
            for suffix, kind, shape in zip(
                (".x", ".y"), (tf.float32, tf.int32), shapes, strict=True
            )
        )
        return tf.data.Dataset.from_tensor_slices((read_x, read_y))

    return read


class Federated:
    """A learning process and what its clients have.

    Args:
        task: what to run.
    """

    def __init__(self, task: Task) -> None:
        x, y = task.data()
        datasets = [
            tf.data.Dataset.from_tensor_slices(pair) for pair in zip(x, y, strict=True)
        ]
        self._process = _build_process(task, datasets[0].element_spec)
        self._clients: list[Any] = datasets
        if task.settings["on_worker"]:
            self._clients = list(range(len(x)))
            simulation = tff.simulation
            self._process = (
                simulation.compose_dataset_computation_with_learning_process(
                    _read_on_worker(task, x, y), self._process
                )
            )
        self._initial = self._process.initialize()
        self._state = self._initial

    def reset(self) -> None:
        """Do nothing: each round is given the first weights."""

    def run_round(self) -> None:
        """Run one round of all clients."""
        self._state = self._process.next(self._initial, self._clients).state

    def weights(self) -> Sequence[Any]:
        """Return those of the last round."""
        held = self._state.global_model_weights.trainable
        return [np.asarray(weights) for weights in held]


def main() -> None:
    """Serve one task."""
    task = Task()
    tff.backends.native.set_sync_local_cpp_execution_context(
        max_concurrent_computation_calls=task.settings["calls"]
    )
    task.serve(Federated(task), "tensorflow-federated")


if __name__ == "__main__":
    main()
