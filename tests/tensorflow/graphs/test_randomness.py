"""Which random ops a key decides, and that no other stays unnamed."""

# pyright: reportUnknownLambdaType=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportPrivateUsage=false
# pyright: reportOperatorIssue=false

import operator
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework.func_graph import FuncGraph

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.randomness as randomness
from ray_fed import tensorflow as rtf
from ray_fed.plan import diagnostics, random_keys
from ray_fed.plan.random_keys import DrawKey
from ray_fed.tensorflow import normal_forms
from ray_fed.tensorflow.loaded_functions import load_function

_FROM_INPUTS = (
    "ComputeAccidentalHits", "CudnnRNN", "KMC2ChainInitialization",
    "KmeansPlusPlusInitialization", "RandomIndexShuffle", "ShuffleDatasetV2",
    "SnapshotDataset", "Stateless",
)  # fmt: skip
"""Starts of ops that draw nothing, or what an input alone decides; CuDNN's draw where
a dropout is asked for, which Keras does outside of them."""


def registered_ops() -> list[Any]:
    ops = op_def_pb2.OpList()
    buffer = pywrap_tf_session.TF_GetAllOpList()
    ops.ParseFromString(pywrap_tf_session.TF_GetBuffer(buffer))
    return list(ops.op)


def test_every_op_of_tensorflow_that_has_a_seed_is_keyed_or_named() -> None:
    known = {
        *randomness._TWINS, *randomness._SEEDED, *randomness._SHAPED,
        *randomness._UNKEYED, "Multinomial", "RandomShuffle",
    }  # fmt: skip

    seeded = {
        op.name
        for op in registered_ops()
        if any("seed" in part.name for part in [*op.attr, *op.input_arg])
    }

    assert len(seeded) > 40
    unknown = seeded - known
    assert {name for name in unknown if not name.startswith(_FROM_INPUTS)} == set()


def test_every_op_that_draws_is_known_by_its_name() -> None:
    keyed = randomness._TWINS.keys() | randomness._SEEDED.keys()
    keyed |= randomness._SHAPED.keys() | {"Multinomial", "RandomShuffle"}

    names = [name.encode() for name in keyed | randomness._UNKEYED]

    assert [name for name in names if not random_keys.may_draw(name)] == []
    assert not random_keys.may_draw(
        b"AddV2 MatMul TensorSliceDataset StatefulPartitionedCall"
    )


def loaded(fn: Callable[[], Any]) -> Callable[[int], Any]:
    """Return a function from a client's index to what the client draws."""
    return load(rtf.computation(fn))


def load(comp: Any) -> Callable[[int], Any]:
    message = comp.to_proto().tensorflow
    function = load_function(message, comp.type_signature, None)

    def draw(client: int) -> Any:
        with random_keys.using(DrawKey(seed=0, invocation=0, client=client)):
            result = normal_forms.compute(function(), comp.type_signature.result)
        return np.asarray(result)

    return draw


def numbers(dataset: Any) -> Any:
    return dataset.batch(100).get_single_element()


def mapped(calls: int | None, *, deterministic: bool | None = None) -> Any:
    dataset = tf.data.Dataset.range(24).map(
        lambda i: tf.cast(i, tf.float32) + tf.random.uniform([]),
        num_parallel_calls=calls,
        deterministic=deterministic,
    )
    return numbers(dataset)


def interleaved(calls: int | None) -> Any:
    def some(start: Any) -> Any:
        return tf.data.Dataset.range(4).map(
            lambda i: tf.cast(start + i, tf.float32) + tf.random.uniform([])
        )

    dataset = tf.data.Dataset.range(4)
    return numbers(dataset.interleave(some, 2, num_parallel_calls=calls))


def filtered() -> Any:
    kept = tf.data.Dataset.range(64).filter(lambda _: tf.random.uniform([]) < 0.5)
    return numbers(kept)


DRAWING: dict[str, Callable[[], Any]] = {
    "map": lambda: mapped(None),
    "parallel map": lambda: mapped(4),
    "parallel map out of order": lambda: mapped(4, deterministic=False),
    "interleave": lambda: interleaved(None),
    "parallel interleave": lambda: interleaved(4),
    "filter": filtered,
    "prefetch": lambda: numbers(
        tf.data.Dataset.range(9)
        .map(lambda _: tf.random.normal([]), num_parallel_calls=2)
        .prefetch(4)
    ),
    "shuffle": lambda: numbers(tf.data.Dataset.range(20).shuffle(5)),
    "repeated shuffle": lambda: numbers(tf.data.Dataset.range(20).shuffle(5).repeat(2)),
    "random dataset": lambda: numbers(tf.data.Dataset.random().take(4)),
    "random dataset again": lambda: numbers(
        tf.data.Dataset.random(rerandomize_each_iteration=True).take(4).repeat(2)
    ),
    "sample from datasets": lambda: numbers(
        tf.data.Dataset.sample_from_datasets(
            [tf.data.Dataset.range(9), tf.data.Dataset.range(50, 59)], [0.5, 0.5]
        )
    ),
    "rejection": lambda: numbers(
        tf.data.Dataset.range(40).rejection_resample(
            lambda i: tf.cast(i % 2, tf.int32), [0.9, 0.1]
        ).map(lambda _, i: i)
    ),
    "gamma": lambda: tf.random.gamma([3], tf.constant([[1.0, 2.0], [0.5, 4.0]])),
    "gamma of one": lambda: tf.random.gamma([4], 2.0, beta=3.0, dtype=tf.float64),
    "poisson": lambda: tf.random.poisson([5], [3.0, 9.0]),
    "poisson of integers": lambda: tf.random.poisson([9], 30.0, dtype=tf.int64),
    "generator": lambda: tf.random.Generator.from_non_deterministic_state().normal([3]),
    "binomial": lambda: tf.random.Generator.from_non_deterministic_state().binomial(
        [9], counts=1000.0, probs=0.5
    ),
}  # fmt: skip


@pytest.mark.parametrize("fn", DRAWING.values(), ids=DRAWING.keys())
def test_a_client_draws_the_same_again_and_another_one_differs(
    fn: Callable[[], Any],
) -> None:
    comp = rtf.computation(fn)
    here, there = load(comp), load(comp)

    with diagnostics.noting() as unkeyed:
        drawn = [draw(client).tobytes() for client in (0, 1) for draw in (here, there)]
        again = here(0).tobytes()

    assert drawn[0] == drawn[1] == again
    assert drawn[2] == drawn[3]
    assert drawn[0] != drawn[2]
    assert unkeyed == set()


def test_gamma_has_a_draw_for_each_parameter_and_the_right_mean() -> None:
    draw = loaded(lambda: tf.random.gamma([20_000], [1.0, 3.0], beta=2.0))

    sample = draw(0)

    assert sample.shape == (20_000, 2)
    np.testing.assert_allclose(sample.mean(axis=0), [0.5, 1.5], rtol=0.03)
    np.testing.assert_allclose(sample.var(axis=0), [0.25, 0.75], rtol=0.06)


def test_poisson_has_a_draw_for_each_parameter_and_the_right_mean() -> None:
    draw = loaded(lambda: tf.random.poisson([20_000], [2.0, 9.0], dtype=tf.int32))

    sample = draw(0)

    assert sample.shape == (20_000, 2)
    np.testing.assert_allclose(sample.mean(axis=0), [2.0, 9.0], rtol=0.03)
    np.testing.assert_allclose(sample.var(axis=0), [2.0, 9.0], rtol=0.06)


def test_an_op_that_cannot_be_keyed_is_noted_with_its_computation() -> None:
    draw = loaded(
        lambda: (
            tf.random.log_uniform_candidate_sampler(
                tf.constant([[1]], tf.int64), 1, 1, unique=True, range_max=5, name="few"
            ).sampled_candidates
        )
    )

    with diagnostics.noting() as unkeyed:
        draw(0)
        draw(1)

    (noted,) = unkeyed
    assert noted.computation.startswith("the computation `<lambda>` (test_random")
    assert noted.ops == ("few (LogUniformCandidateSampler)",)


def test_draws_of_a_sequence_that_is_returned_are_noted() -> None:
    draw = loaded(lambda: tf.data.Dataset.range(3).map(lambda _: tf.random.uniform([])))

    with diagnostics.noting() as unkeyed:
        draw(0)

    ((op,),) = [noted.ops for noted in unkeyed]
    assert op.endswith("(RandomUniform)")


def test_a_shuffled_sequence_that_is_returned_needs_no_note() -> None:
    draw = loaded(lambda: tf.data.Dataset.range(30).shuffle(30))

    with diagnostics.noting() as unkeyed:
        first, second = draw(0), draw(0)

    assert first.tobytes() == second.tobytes()
    assert unkeyed == set()


def parallel_map(draw: Callable[[Any], Any]) -> tuple[list[str], list[str]]:
    """Return the inputs of a parallel map, before and after its graph is keyed."""

    @rtf.computation(fl.SequenceType(np.float32))
    def work(dataset: Any) -> Any:
        mapped = dataset.map(draw, num_parallel_calls=4).shuffle(3)
        return mapped.reduce(np.float32(0), operator.add)

    graph_def = graph_message.graph_of(work.to_proto().tensorflow)
    (node,) = (n for n in graph_def.node if n.op == "ParallelMapDatasetV2")
    before = [*node.input]
    randomness.key_random_ops(graph_def)
    return before, [*node.input]


def test_a_parallel_map_that_draws_runs_in_order() -> None:
    before, after = parallel_map(lambda x: x + tf.random.uniform([]))

    assert before[:-1] == after[:-1]
    assert after[-1].endswith("/ray_fed_one")


def test_a_parallel_map_that_does_not_draw_stays_parallel() -> None:
    before, after = parallel_map(lambda x: x + 1)

    assert before == after


@pytest.mark.parametrize("building", [tf.Graph, FuncGraph], ids=["graph", "function"])
def test_states_are_freed_while_a_graph_is_built(building: Any) -> None:
    states = randomness.RandomStates()
    states.names = ["a state that is freed late"]
    states.create()
    (handle,) = states._handles
    graph = building("of another's") if building is FuncGraph else building()

    with graph.as_default():
        states.close()

    assert not graph.get_operations()
    assert not tf.raw_ops.VarIsInitializedOp(resource=handle)
