"""What is put in place of ops that a GPU may not run, computed on a CPU."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownLambdaType=false, reportPrivateUsage=false

from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed
import ray_fed.tensorflow.graphs.loader as loader
from ray_fed import tensorflow as rtf

SPARSE, DENSE = "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"
LOGITS = np.array(
    [[0.5, -1.0, 2.0], [1e4, 0.0, -1e4], [-np.inf, 0.0, 1.0], [3.0, 3.0, 3.0]]
)


@pytest.fixture(autouse=True)
def _determinism_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.config, "is_op_determinism_enabled", lambda: True)


def labels_of(op: str, dtype: tf.DType) -> Any:
    if op == SPARSE:
        return tf.constant([2, 0, 1, 2], tf.int32)
    return tf.constant(np.eye(3)[[2, 0, 1, 2]], dtype)


def graph_of(work: Callable[..., Any], *arguments: Any) -> tuple[Any, list[str], Any]:
    """Return a graph, and the names of what it is fed and gives."""
    found: Any = tf.function(work).get_concrete_function(*arguments)
    names = [tensor.name for tensor in found.inputs]
    return found.graph.as_graph_def(), names, [each.name for each in found.outputs]


def ops_of(graph_def: Any) -> set[str]:
    nodes = [
        *graph_def.node,
        *(n for f in graph_def.library.function for n in f.node_def),
    ]
    return {node.op for node in nodes}


def run(graph_def: Any, feeds: list[str], fetches: Any, *arguments: Any) -> list[Any]:
    loader.isolate(graph_def)
    found = loader.import_function(graph_def, feeds, list(fetches))(list(arguments))
    return [each.numpy() for each in found]


@pytest.mark.parametrize(
    ("dtype", "place"),
    [
        (tf.float16, "graph"),
        (tf.float32, "function"),
        (tf.float64, "loop"),
        (tf.bfloat16, "graph"),
    ],
)
@pytest.mark.parametrize("op", [SPARSE, DENSE])
def test_loss_and_gradient_are_those_of_the_op(
    op: str, dtype: tf.DType, place: str
) -> None:
    def cross(logits: Any, labels: Any) -> Any:
        return getattr(tf.raw_ops, op)(features=logits, labels=labels)

    def in_loop(logits: Any, labels: Any) -> Any:
        def step(k: Any, loss: Any, grad: Any) -> Any:
            one, other = cross(logits, labels)
            return k + 1, loss + one, grad + other

        start = [0, tf.zeros_like(logits[:, 0]), tf.zeros_like(logits)]
        return tf.while_loop(lambda k, *_: k < 2, step, start)[1:]

    work: Any = {"graph": cross, "function": tf.function(cross), "loop": in_loop}[place]
    logits = tf.constant(LOGITS, dtype)
    labels = labels_of(op, dtype)
    if op == DENSE:  # nothing times minus infinity is no number, by either
        logits = tf.where(tf.math.is_inf(logits), tf.constant(-9.0, dtype), logits)
    expected = [each.numpy() for each in tf.function(work)(logits, labels)]
    graph_def, feeds, fetches = graph_of(work, logits, labels)

    loader.use_deterministic_ops(graph_def)

    assert op not in ops_of(graph_def)
    found = run(graph_def, feeds, fetches, logits, labels)
    eps = {tf.float64: 1e-15, tf.float32: 1e-6}.get(dtype, 1e-1)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            one.astype(np.float64), other.astype(np.float64), eps, eps
        )


def test_label_of_no_class_is_no_number() -> None:
    def cross(logits: Any, labels: Any) -> Any:
        return tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
            features=logits, labels=labels
        )

    logits, labels = tf.zeros([3, 3]), tf.constant([0, 3, -1], tf.int64)
    graph_def, feeds, fetches = graph_of(cross, logits, labels)

    loader.use_deterministic_ops(graph_def)
    loss, backprop = run(graph_def, feeds, fetches, logits, labels)

    assert np.isnan(loss).tolist() == [False, True, True]
    assert np.isnan(backprop).tolist() == [[False] * 3, [True] * 3, [True] * 3]


def test_what_an_op_waits_for_is_waited_for() -> None:
    def cross(logits: Any, labels: Any) -> Any:
        return tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
            features=logits, labels=labels
        )

    logits, labels = tf.zeros([2, 3]), tf.constant([0, 1])
    graph_def, feeds, fetches = graph_of(cross, logits, labels)
    (node,) = [node for node in graph_def.node if node.op == SPARSE]
    waits = f"^{graph_def.node[0].name}"
    node.input.append(waits)

    loader.use_deterministic_ops(graph_def)

    assert (node.op, node.input[-1]) == ("IdentityN", waits)
    assert len(run(graph_def, feeds, fetches, logits, labels)) == 2


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "interpreter"])
def test_client_work_has_them_with_kernels_and_without(
    monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    is_on = False  # as in a driver, where work is traced
    monkeypatch.setattr(loader.config, "is_op_determinism_enabled", lambda: is_on)
    replaced: list[str] = []
    replace: Any = loader._replace

    def note(node: Any, nodes: Any, **where: Any) -> None:
        replaced.append(node.op)
        replace(node, nodes, **where)

    @rtf.computation(fl.TensorType(np.float32, [2, 3]), fl.TensorType(np.int32, [2]))
    def train(weights: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, weights)
        return weights - tape.gradient(loss, weights)

    @fl.federated_computation(
        fl.FederatedType(fl.TensorType(np.float32, [2, 3]), fl.SERVER),
        fl.FederatedType(fl.TensorType(np.int32, [2]), fl.CLIENTS),
    )
    def average(weights: Any, labels: Any) -> Any:
        each = fl.federated_map(train, (fl.federated_broadcast(weights), labels))
        return fl.federated_mean(each)

    weights, labels = np.eye(3, dtype=np.float32)[:2], [[0, 1], [2, 2], [1, 0]]
    config = ray_fed.Config(backend="local", workers=1, kernels={"enabled": kernels})
    monkeypatch.setattr(loader, "_replace", note)
    is_on = True
    with ray_fed.create_context(config) as context:
        found = context.invoke(average, (weights, labels))

    assert set(replaced) == {SPARSE}
    chances = np.exp(weights) / np.exp(weights).sum(1, keepdims=True)
    expected = np.mean([weights - (chances - np.eye(3)[of]) for of in labels], 0)
    np.testing.assert_allclose(found, expected, 1e-6, 1e-6)
