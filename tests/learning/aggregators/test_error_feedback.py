"""Error feedback: what compression took from a client's update is in its next one."""

import pathlib
from typing import Any

import federated_language as fl
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import Model, aggregators

SHAPES = [(4, 5), (3,)]
UPDATE_TYPE = fl.to_type(tuple(fl.TensorType(np.float32, shape) for shape in SHAPES))
WEIGHT_TYPE = fl.TensorType(np.float32)
WEIGHTS = np.array([1, 3, 0, 2], np.float32)


def draw_updates(round_index: int) -> list[Any]:
    generator = np.random.default_rng(round_index)
    return [
        tuple(generator.normal(size=shape).astype("f") for shape in SHAPES)
        for _ in WEIGHTS
    ]


def keep_largest(tensor: Any, number: int) -> Any:
    threshold = np.sort(np.abs(tensor).ravel())[-number]
    return np.where(np.abs(tensor) >= threshold, tensor, 0)


def test_sparsified_with_error_feedback_is_the_loop_of_the_paper(
    thread_context: ExecutionContext,
) -> None:
    part = aggregators.sparsified(0.2, error_feedback=True).build(
        UPDATE_TYPE, WEIGHT_TYPE
    )
    state, kept = part.initialize(), [part.client_state] * len(WEIGHTS)
    residuals = [[np.zeros(shape, "f") for shape in SHAPES] for _ in WEIGHTS]

    for round_index in range(4):
        updates = draw_updates(round_index)
        state, merged, metrics, kept = part.next(state, updates, list(WEIGHTS), kept)

        total = [np.zeros(shape, "f") for shape in SHAPES]
        for client in np.flatnonzero(WEIGHTS):
            for place, number in enumerate((4, 1)):
                corrected = updates[client][place] + residuals[client][place]
                sent = keep_largest(corrected, number)
                residuals[client][place] = corrected - sent
                total[place] += WEIGHTS[client] * sent
        for found, expected in zip(merged, total, strict=True):
            np.testing.assert_allclose(found, expected / WEIGHTS.sum(), rtol=1e-5)
        for found, expected in zip(kept, residuals, strict=True):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6)
        assert metrics == {"bytes_sent": 3 * 5 * 8, "bytes_uncompressed": 3 * 23 * 4}
    assert thread_context.last_report is not None
    assert thread_context.last_report.no_kernel == ()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_quantized_with_error_feedback_keeps_what_rounding_took(dtype: Any) -> None:
    update_type = fl.TensorType(dtype, [50])
    part = aggregators.quantized(2, error_feedback=True).build(update_type, WEIGHT_TYPE)
    state, kept = part.initialize(), [part.client_state]
    exact = sent = np.zeros(50, np.float64)
    residual = np.zeros(50, np.float32)

    for round_index in range(3):
        update = np.random.default_rng(round_index).normal(size=50).astype(dtype)
        state, merged, _, kept = part.next(state, [update], [np.float32(1)], kept)

        corrected = update.astype("f") + residual
        residual = corrected - merged.astype("f")
        np.testing.assert_array_equal(kept[0][0], residual)
        low, high = corrected.min(), corrected.max()
        steps = (merged.astype("f") - low) / (high - low) * 3
        np.testing.assert_allclose(steps, np.round(steps), atol=0.05)
        assert len(np.unique(np.round(steps))) > 2
        exact = exact + update.astype(np.float64)
        sent = sent + merged.astype(np.float64)
    # All that was not sent is what the client still has.
    np.testing.assert_allclose(sent + residual, exact, atol=1e-5)


def test_error_feedback_works_inside_of_other_aggregators() -> None:
    """Clipping comes before, and both compressors have a residual of their own."""
    inner = aggregators.quantized(16, error_feedback=True)
    both = aggregators.sparsified(0.5, inner, error_feedback=True)
    adaptive = aggregators.AdaptiveNorm(initial=0.5)
    made = aggregators.with_sum(aggregators.clipped(adaptive, both))
    update_type = fl.to_type((fl.TensorType(np.float32, [4]), WEIGHT_TYPE))
    part = made.build(update_type, WEIGHT_TYPE)
    update = np.array([3.0, 0.0, -4.0, 1e-3], np.float32)

    _, merged, _, kept = part.next(
        part.initialize(),
        [(update, np.float32(7))],
        [np.float32(1)],
        [part.client_state],
    )

    clipped = update * np.float32(0.5 / np.linalg.norm(update))
    largest = clipped * [1, 0, 1, 0]
    np.testing.assert_allclose(merged[0], largest, atol=1e-4)
    assert merged[1] == 7
    (sparse,), (rounded,) = kept[0]
    np.testing.assert_allclose(sparse, clipped - largest, atol=1e-7)
    np.testing.assert_allclose(rounded, largest - merged[0], atol=1e-7)


def bits(*values: Any) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in tf.nest.flatten(values))


@pytest.mark.parametrize(
    "name", ["averaging", pytest.param("scaffold", marks=pytest.mark.slow)]
)
def test_resumed_runs_have_the_residuals_of_clients(
    name: str, linear_model: Model, make_batches: Any, tmp_path: pathlib.Path
) -> None:
    inner = aggregators.quantized(4, aggregators.mean(weighted=False))
    made = aggregators.sparsified(0.4, inner, error_feedback=True)
    sgd = keras.optimizers.SGD(0.05)
    process = (
        learning.build_fed_avg(linear_model, sgd, aggregator=made)
        if name == "averaging"
        else learning.build_scaffold(linear_model, 0.05, num_clients=5, aggregator=made)
    )
    clients = [make_batches([4, 2], seed) for seed in range(5)]

    def run(num_rounds: int, **more: Any) -> Any:
        return learning.run(
            process, clients, num_rounds=num_rounds, cohort_size=3, seed=1, **more
        )

    whole = run(4)
    run(2, storage_path=tmp_path)
    resumed = run(4, storage_path=tmp_path)
    first = run(3)
    continued = run(4, state=first.state, client_states=first.client_states)

    expected = bits(whole.state, whole.client_states.take(range(5)))
    for result in (resumed, continued):
        assert bits(result.state, result.client_states.take(range(5))) == expected
    (own,) = whole.client_states.take([whole.history[-1].clients[0]])
    kernel, _ = own if name == "averaging" else own[1]
    assert np.any(kernel)


def test_a_client_that_is_left_out_keeps_its_residual(linear_model: Model) -> None:
    process = learning.build_fed_avg(
        linear_model,
        keras.optimizers.SGD(0.05),
        aggregator=aggregators.sparsified(0.3, error_feedback=True),
        guards=learning.Guards(non_finite="leave_out"),
    )
    own = tuple(np.full_like(a, 0.5) for a in process.initial_client_state)
    x = np.full((2, 3), np.inf, np.float32)

    _, kept, metrics = process.next(
        process.initialize(), [own], [[{"x": x, "y": x[:, :1]}]]
    )

    assert metrics["left_out"] == 1
    for found, expected in zip(kept[0], own, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_updates_without_floats_have_no_residual() -> None:
    update_type = fl.TensorType(np.int32, [2])

    part = aggregators.sparsified(0.5, error_feedback=True).build(
        update_type, WEIGHT_TYPE
    )

    assert part.client_state is None


def test_other_settings_are_refused() -> None:
    made: Any = aggregators.sparsified
    with pytest.raises(errors.ConfigError, match="`error_feedback` to be True or"):
        made(0.5, error_feedback=1)
