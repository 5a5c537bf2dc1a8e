"""What aggregators make of a few updates, against numpy; none is interpreted."""

import math
from typing import Any, cast

import federated_language as fl
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.learning import Model, aggregators, build_fed_avg
from ray_fed.learning.aggregators import Aggregator

UPDATE_TYPE = fl.to_type((fl.TensorType(np.float32, [2, 2]), fl.TensorType(np.float32)))
WEIGHT_TYPE = fl.TensorType(np.float32)
WEIGHTS = [np.float32(w) for w in (1, 3, 2, 0, 5)]
PRESENT = [w > 0 for w in WEIGHTS]


def make_updates() -> list[Any]:
    generator = np.random.default_rng(0)
    return [
        (generator.normal(size=(2, 2)).astype("f") * scale, np.float32(scale))
        for scale in (1, 2, 0.5, 50, 3)
    ]


UPDATES = make_updates()
MATRICES = np.array([matrix for matrix, _ in UPDATES])
NORMS = np.array([np.sqrt((m**2).sum() + s**2) for m, s in UPDATES])


def aggregate(aggregator: Any, context: ExecutionContext, rounds: int = 1) -> Any:
    """Return state, aggregate and metrics of the last of some equal rounds."""
    part = aggregator.build(UPDATE_TYPE, WEIGHT_TYPE)
    result = (part.initialize(),)
    for _ in range(rounds):
        result = part.next(result[0], UPDATES, WEIGHTS)
    assert context.last_report is not None
    assert context.last_report.no_kernel == ()
    assert context.last_report.kernel_leaves > 0
    return result


def mean_of(values: Any, weights: Any) -> Any:
    return np.average(values, axis=0, weights=weights)


def test_means_and_sums_are_weighted_as_asked(thread_context: ExecutionContext) -> None:
    found = [
        aggregate(made, thread_context)[1][0]
        for made in (
            aggregators.mean(),
            aggregators.mean(weighted=False),
            aggregators.sum_of_updates(),
            aggregators.sum_of_updates(weighted=True),
        )
    ]

    weights = np.array(WEIGHTS)[:, None, None]
    expected = [
        mean_of(MATRICES, WEIGHTS),
        mean_of(MATRICES, PRESENT),
        MATRICES[PRESENT].sum(axis=0),
        (MATRICES * weights).sum(axis=0),
    ]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_clipping_scales_and_zeroing_drops_what_is_above(
    thread_context: ExecutionContext,
) -> None:
    _, clipped, clip_metrics = aggregate(aggregators.clipped(2.0), thread_context)
    _, zeroed, zero_metrics = aggregate(aggregators.zeroed(5.0), thread_context)

    largest = np.array([max(np.abs(m).max(), np.abs(s)) for m, s in UPDATES])
    bound = float(np.median(largest))
    of_largest = aggregators.zeroed(bound, norm_order=math.inf)
    _, by_largest, _ = aggregate(of_largest, thread_context)
    np.testing.assert_allclose(
        by_largest[0],
        mean_of(MATRICES * (largest <= bound)[:, None, None], WEIGHTS),
        rtol=1e-5,
    )
    for order in (1, True, "inf", None):
        with pytest.raises(errors.ConfigError, match="`norm_order` to be 2 or"):
            aggregators.zeroed(1.0, norm_order=cast("Any", order))
    factors = np.minimum(1, 2 / NORMS)[:, None, None]
    np.testing.assert_allclose(
        clipped[0], mean_of(MATRICES * factors, WEIGHTS), rtol=1e-5
    )
    within = (NORMS <= 5)[:, None, None]
    np.testing.assert_allclose(
        zeroed[0], mean_of(MATRICES * within, WEIGHTS), rtol=1e-5
    )
    present = NORMS[PRESENT]
    assert list(clip_metrics) == ["clip_norm", "share_clipped", "mean_norm"]
    np.testing.assert_allclose(
        list(clip_metrics.values()), [2, (present > 2).mean(), present.mean()], 1e-5
    )
    assert zero_metrics["share_zeroed"] == np.float32((present > 5).mean())


def test_aggregators_compose_and_report_together(
    thread_context: ExecutionContext,
) -> None:
    adapt = aggregators.AdaptiveNorm(initial=4.0, quantile=1.0, learning_rate=0.5)
    made = aggregators.zeroed(
        20.0, aggregators.clipped(adapt, aggregators.quantized(16))
    )

    state, merged, metrics = aggregate(made, thread_context, rounds=2)

    below = (NORMS[PRESENT] <= 4.0).mean()
    bound = 4.0 * np.exp(-0.5 * (below - 1.0))
    np.testing.assert_allclose(metrics["clip_norm"], bound, rtol=1e-5)
    assert state[1][0][0] > bound
    factors = (np.minimum(1, bound / NORMS) * (NORMS <= 20))[:, None, None]
    np.testing.assert_allclose(
        merged[0], mean_of(MATRICES * factors, WEIGHTS), atol=1e-3
    )
    assert list(metrics) == [
        "zero_norm",
        "share_zeroed",
        "clip_norm",
        "share_clipped",
        "mean_norm",
        "bytes_sent",
        "bytes_uncompressed",
    ]


def test_median_and_trimmed_mean_leave_outliers_out(
    thread_context: ExecutionContext,
) -> None:
    _, median, _ = aggregate(aggregators.median(max_clients=9), thread_context)
    _, trimmed, metrics = aggregate(
        aggregators.trimmed_mean(0.25, max_clients=4), thread_context
    )

    rows = np.sort(MATRICES[PRESENT], axis=0)
    np.testing.assert_allclose(median[0], np.median(rows, axis=0), rtol=1e-6)
    np.testing.assert_allclose(trimmed[0], rows[1:3].mean(axis=0), rtol=1e-6)
    assert metrics == {"num_aggregated": 4, "num_trimmed": 2}


def test_more_clients_than_a_median_has_rows_for_are_an_error() -> None:
    part = aggregators.median(max_clients=3).build(UPDATE_TYPE, WEIGHT_TYPE)

    with pytest.raises(errors.ComputationError, match="at most 3 clients"):
        part.next(part.initialize(), UPDATES, WEIGHTS)


def test_sparsified_updates_keep_the_largest_numbers(
    thread_context: ExecutionContext,
) -> None:
    _, merged, metrics = aggregate(aggregators.sparsified(0.25), thread_context)

    largest = np.abs(MATRICES).max(axis=(1, 2), keepdims=True)
    kept = np.where(np.abs(MATRICES) == largest, MATRICES, 0)
    np.testing.assert_allclose(merged[0], mean_of(kept, WEIGHTS), rtol=1e-5)
    assert metrics == {"bytes_sent": 4 * (8 + 8), "bytes_uncompressed": 4 * 20}


@pytest.mark.slow
def test_quantized_updates_are_unbiased(thread_context: ExecutionContext) -> None:
    part = aggregators.quantized(2).build(UPDATE_TYPE, WEIGHT_TYPE)
    state = part.initialize()

    found = [part.next(state, UPDATES, WEIGHTS)[1][0] for _ in range(300)]

    exact = mean_of(MATRICES, WEIGHTS)
    spread = np.std(found, axis=0)
    assert spread.max() > 0.1
    error = np.abs(np.mean(found, axis=0) - exact)
    assert np.all(error < 5 * spread / np.sqrt(300) + 1e-6)


def test_secure_mean_is_that_of_clipped_integers(
    thread_context: ExecutionContext,
) -> None:
    made = aggregators.secure_mean(bound=2.0, bits=12, max_clients=8)

    _, merged, metrics = aggregate(made, thread_context)

    clipped = np.clip(MATRICES, -2, 2)
    np.testing.assert_allclose(merged[0], mean_of(clipped, PRESENT), atol=4 / 4095)
    outside = sum(
        int((np.abs(m) > 2).sum() + (s > 2))
        for (m, s), present in zip(UPDATES, PRESENT, strict=True)
        if present
    )
    assert metrics == {"modulus": 2 ** (12 + 3), "num_clipped": outside}


AGGREGATORS: dict[str, Aggregator] = {
    "mean": aggregators.mean(),
    "unweighted": aggregators.mean(weighted=False),
    "sum": aggregators.sum_of_updates(),
    "weighted sum": aggregators.sum_of_updates(weighted=True),
    "clipped": aggregators.clipped(1e-4),
    "adaptive": aggregators.clipped(aggregators.AdaptiveNorm()),
    "zeroed": aggregators.zeroed(100.0),
    "median": aggregators.median(max_clients=4),
    "trimmed_mean": aggregators.trimmed_mean(0.1, max_clients=4),
    "quantized": aggregators.quantized(1),
    "quantized finely": aggregators.quantized(16),
    "sparsified": aggregators.sparsified(1e-6),
    "secure_mean": aggregators.secure_mean(bound=4.0, bits=24),
    "dp_mean": aggregators.dp_mean(1.0, 1e-9, 3, 10, 1e-5),
    "dp_ftrl_mean": aggregators.dp_ftrl_mean(1.0, 1e-9, 3, 10, 1e-5),
    "clipped sum": aggregators.clipped(1.0, aggregators.sum_of_updates()),
}
FLOATS: tuple[Any, ...] = (np.float16, tf.bfloat16.as_numpy_dtype, "f4", "f8")


@pytest.mark.slow
def test_numbers_of_examples_do_not_overflow_short_floats() -> None:
    """100,000 examples, and 65,535 levels, are infinite in float16."""
    update_type = fl.to_type(
        tuple(fl.TensorType(np.dtype(dtype).type, [3]) for dtype in FLOATS)
    )
    numbers = np.array([[1, 2, 3], [2, 2, 2], [3, 2, 1]]) / 256
    weights = [50_000, 50_000, 100_000]
    updates = [tuple(np.asarray(row, dtype) for dtype in FLOATS) for row in numbers]
    means = {
        "weighted": mean_of(numbers, weights),
        "unweighted": mean_of(numbers, None),
    }
    expected: dict[str, Any] = {
        **dict.fromkeys(("mean", "adaptive", "zeroed"), means["weighted"]),
        **dict.fromkeys(("quantized finely",), means["weighted"]),
        **dict.fromkeys(("unweighted", "median", "trimmed_mean"), means["unweighted"]),
        **dict.fromkeys(("secure_mean", "dp_mean"), means["unweighted"]),
        "dp_ftrl_mean": means["unweighted"],
        "sum": numbers.sum(axis=0),
        "clipped sum": numbers.sum(axis=0),
        "weighted sum": np.array(weights) @ numbers,
    }
    for name, exact in expected.items():
        part = AGGREGATORS[name].build(update_type, WEIGHT_TYPE)
        found = part.next(part.initialize(), updates, [np.float32(w) for w in weights])
        for merged, dtype in zip(found[1], FLOATS, strict=True):
            step = float(ml_dtypes.finfo(dtype).eps)
            assert merged.dtype == dtype
            np.testing.assert_allclose(
                merged.astype(np.float64), exact, step, 1e-6, err_msg=f"{name}, {dtype}"
            )


def test_integers_have_means_that_are_none_and_no_noise() -> None:
    update_type = fl.to_type((fl.TensorType(np.int32, [2]),))
    updates = [(np.array([30_000, 1], np.int32),), (np.array([30_001, 2], np.int32),)]
    weights = [np.float32(100_000.0), np.float32(100_000.0)]

    for name in ("mean", "unweighted", "median"):
        part = AGGREGATORS[name].build(update_type, WEIGHT_TYPE)
        merged = part.next(part.initialize(), updates, weights)[1]
        assert merged[0].tolist() == [30_000.5, 1.5], name
    for name in ("dp_mean", "dp_ftrl_mean"):
        with pytest.raises(errors.ValueMismatchError, match=f"`{name}`, found int32"):
            AGGREGATORS[name].build(update_type, WEIGHT_TYPE)


def build_normalized(layer: Any) -> Model:
    keras_model = keras.Sequential(
        [keras.Input((3,)), layer, keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    return Model.from_keras(keras_model, loss="mse")


REFUSED = ["sum", "weighted sum", "clipped sum", "secure_mean", "dp_mean",
           "dp_ftrl_mean"]  # fmt: skip


def test_variances_of_batch_normalization_are_no_sums_and_have_no_noise() -> None:
    model = build_normalized(keras.layers.BatchNormalization(momentum=0.5))

    for name in REFUSED:
        with pytest.raises(
            errors.ValueMismatchError, match="found 2, such as those of BatchNorm"
        ):
            build_fed_avg(model, "sgd", aggregator=AGGREGATORS[name])


@pytest.mark.slow
def test_variances_of_batch_normalization_are_averaged() -> None:
    model = build_normalized(keras.layers.BatchNormalization(momentum=0.5))
    # Variances of features: from 1e-4, where that of before is 1, to 1e4.
    scales = np.array([0.01, 1, 100], np.float32)
    x = np.random.default_rng(0).normal(size=(3, 8, 3)).astype(np.float32) * scales
    clients = [[{"x": rows, "y": rows[:, 1]}] for rows in x]
    process = build_fed_avg(
        model, keras.optimizers.SGD(0.1), aggregator=AGGREGATORS["quantized"]
    )
    state = process.initialize()
    variances = np.ones(3)
    for _ in range(8):
        state, _ = process.next(state, clients)
        _, variances = state.weights.non_trainable
        assert np.all(np.isfinite(state.weights.trainable[0]))
        assert np.all(variances > 0)
    expected = 0.5**8 + (1 - 0.5**8) * mean_of(x.var(axis=1), None)
    np.testing.assert_allclose(variances, expected, rtol=1e-3)


def test_constants_of_layers_are_neither_averaged_nor_refused() -> None:
    layer = keras.layers.Normalization()
    layer.adapt(np.random.default_rng(0).normal(size=(20, 3)))
    model = build_normalized(layer)

    process = build_fed_avg(model, "sgd", aggregator=AGGREGATORS["dp_mean"])

    assert process.initialize().weights.non_trainable == ()


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: aggregators.clipped(0.0), "`norm` above 0"),
        (lambda: aggregators.AdaptiveNorm(quantile=1.5), "`quantile` from 0 to 1"),
        (lambda: aggregators.AdaptiveNorm(initial=0), "`initial`"),
        (lambda: aggregators.median(max_clients=0), "`max_clients`"),
        (lambda: aggregators.trimmed_mean(0.5, max_clients=2), "`trimmed_share`"),
        (lambda: aggregators.quantized(0), "`bits`"),
        (lambda: aggregators.clipped(np.inf), "`norm` above 0 and finite"),
        (lambda: aggregators.secure_mean(bound=np.inf), "`bound`"),
        (lambda: aggregators.sparsified(0), "`share`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_out_of_range_are_refused(build: Any, match: str) -> None:
    with pytest.raises(errors.ConfigError, match=match):
        build()
