from typing import Any

import keras
import numpy as np
import pytest

import ray_fed.errors as errors
import ray_fed.learning.fed_eval as fed_eval
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.learning import (
    Model,
    build_client_eval,
    build_fed_avg,
    build_fed_eval,
    run,
    spread,
)


def build_linear(
    units: int, seed: int, *hidden: keras.layers.Layer
) -> tuple[keras.Model, Model]:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((4,)), *hidden, keras.layers.Dense(units)]
    keras_model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [keras.metrics.SparseCategoricalAccuracy("accuracy")]
    keras_model.compile(keras.optimizers.SGD(0.1), loss=loss, metrics=metrics)
    return keras_model, Model.from_keras(keras_model, loss=loss, metrics=metrics)


def build_model() -> tuple[keras.Model, Model]:
    keras.utils.set_random_seed(5)
    return build_linear(
        3,
        5,
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
    )


def make_examples(size: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(size)
    x = generator.normal(size=(size, 4)).astype(np.float32)
    return x, generator.integers(0, 3, size).astype(np.int32)


def cut(x: Any, y: Any, sizes: list[int]) -> list[Any]:
    ends = np.cumsum(sizes)
    return [
        {"x": x[end - size : end], "y": y[end - size : end]}
        for size, end in zip(sizes, ends, strict=True)
    ]


@pytest.mark.parametrize(
    "clients",
    [
        pytest.param([[8, 8, 8, 8, 5]], id="one client, a short last batch"),
        pytest.param([[1, 10], [20], [], [6]], id="four clients, one without examples"),
    ],
)
def test_evaluation_equals_that_of_keras(clients: list[list[int]]) -> None:
    keras_model, model = build_model()
    x, y = make_examples(37)
    batches = iter(cut(x, y, [size for sizes in clients for size in sizes]))
    data = [[next(batches) for _ in sizes] for sizes in clients]
    evaluation = build_fed_eval(model)

    metrics = evaluation.next(evaluation.initialize(), data)

    evaluate: Any = keras_model.evaluate
    expected = evaluate(x, y, verbose=0, return_dict=True)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], expected["accuracy"], rtol=1e-6)
    assert metrics["num_examples"] == 37


def test_evaluation_takes_the_state_of_a_training() -> None:
    _, model = build_model()
    x, y = make_examples(20)
    data = [cut(x, y, [10, 10])]
    training = build_fed_avg(model, keras.optimizers.SGD(0.1))
    state, _ = training.next(training.initialize(), data)

    of_state = build_fed_eval(model, training).next(state, data)
    of_weights = build_fed_eval(model).next(state.weights, data)

    assert of_state == of_weights
    trained = model.to_keras(state)
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    np.testing.assert_allclose(of_state["loss"], loss(y, trained(x)), rtol=1e-5)


def test_a_state_in_place_of_its_weights_is_told(linear_model: Model) -> None:
    state = build_fed_avg(linear_model, "sgd").initialize()

    with pytest.raises(errors.ValueMismatchError, match=r"4: pass its `weights`, such"):
        build_fed_eval(linear_model).next(state, [[]])


def test_evaluation_over_no_examples_has_no_loss() -> None:
    _, model = build_model()
    evaluation = build_fed_eval(model)

    metrics = evaluation.next(evaluation.initialize(), [[]])

    assert metrics["num_examples"] == 0
    assert np.isnan(metrics["loss"])


def test_several_models_have_the_metrics_of_each_alone() -> None:
    models = {"small": build_linear(3, 1)[1], "large": build_linear(5, 2)[1]}
    data = [cut(*make_examples(20), [10, 10]), cut(*make_examples(7), [7])]
    both = build_fed_eval(models)

    metrics = both.next(both.initialize(), data)

    for name, model in models.items():
        alone = build_fed_eval(model)
        assert metrics[name] == alone.next(alone.initialize(), data)
    assert metrics["small"] != metrics["large"]


def test_each_client_has_the_metrics_of_keras(thread_context: ExecutionContext) -> None:
    keras_model, model = build_model()
    sizes = [[4, 3], [9], [], [1]]
    examples = [make_examples(sum(each)) for each in sizes]
    data = [cut(*each, size) for each, size in zip(examples, sizes, strict=True)]
    evaluation = build_client_eval(model)

    found = evaluation.next(evaluation.initialize(), data)

    report = thread_context.last_report
    assert report is not None
    assert report.no_kernel == ()
    evaluate: Any = keras_model.evaluate
    for own, (x, y) in zip(found, examples, strict=True):
        assert own["num_examples"] == len(x)
        if len(x):
            expected = evaluate(x, y, verbose=0, return_dict=True)
            np.testing.assert_allclose(own["loss"], expected["loss"], rtol=1e-5)
            np.testing.assert_allclose(own["accuracy"], expected["accuracy"])


def test_fine_tuned_clients_have_the_metrics_of_keras_after_fit() -> None:
    epochs = 3
    keras_model, model = build_linear(3, 4)
    start = keras_model.get_weights()
    tuning = [make_examples(size) for size in (8, 16)]
    held = [make_examples(size) for size in (5, 6)]
    evaluation = build_client_eval(
        model, fine_tuning=keras.optimizers.SGD(0.1), epochs=epochs
    )

    found = evaluation.next(
        evaluation.initialize(),
        [cut(x, y, [4] * (len(x) // 4)) for x, y in tuning],
        [cut(x, y, [len(x)]) for x, y in held],
    )

    typed: Any = keras_model
    for own, (x, y), (x_held, y_held) in zip(found, tuning, held, strict=True):
        keras_model.set_weights(start)
        typed.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
        expected = typed.evaluate(x_held, y_held, verbose=0, return_dict=True)
        np.testing.assert_allclose(own["loss"], expected["loss"], rtol=1e-4)


def test_spread_is_that_of_numpy_over_clients_with_examples() -> None:
    losses = np.random.default_rng(0).permutation(20) / 7
    clients = [{"loss": loss, "num_examples": 3} for loss in losses]
    nothing = {"loss": np.nan, "num_examples": 0}

    found = spread([nothing, *clients])

    ordered = np.sort(losses)
    assert found["loss"] == pytest.approx(
        {
            "mean": losses.mean(),
            "deviation": losses.std(),
            "variance": losses.var(),
            "median": np.median(losses),
            **{f"p{p}": np.percentile(losses, p) for p in (10, 25, 75, 90)},
            "lowest": ordered[:2].mean(),
            "highest": ordered[-2:].mean(),
            "jain": losses.sum() ** 2 / (20 * (losses**2).sum()),
        }
    )
    chosen = spread(iter(clients), percentiles=[2.5])["loss"]
    assert chosen["p2.5"] == pytest.approx(np.percentile(losses, 2.5))
    assert "p10" not in chosen
    assert spread(clients[:3], share=0.01)["loss"]["highest"] == max(losses[:3])
    alone = [{"a": value, "num_examples": 1} for value in (0.0, 0.0, 3.0, 0.0)]
    assert spread(alone)["a"]["jain"] == 0.25
    assert spread(alone)["num_examples"]["jain"] == 1.0
    assert np.isnan(spread(alone[:2])["a"]["jain"])
    vectors = [{"f1": np.array([0.0, n]), "num_examples": 1} for n in range(1, 4)]
    assert spread(vectors)["f1/1"]["median"] == 2.0


def test_run_records_the_spread_over_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fed_eval, "_CLIENTS_AT_ONCE", 2)
    _, model = build_linear(3, 0)
    training = build_fed_avg(model, keras.optimizers.SGD(0.1))
    sizes = (3, 5, 4, 6, 2)
    data = {f"client {size}": cut(*make_examples(size), [size]) for size in sizes}
    evaluation = build_client_eval(model, training)

    result = run(
        training, data, num_rounds=2, evaluate=evaluation, validation_data=data
    )

    by_client = evaluation.next(result.state, list(data.values()))
    losses = [metrics["loss"] for metrics in by_client]
    history = result.history
    assert history.values("loss/variance")[-1] == pytest.approx(np.var(losses))
    assert history.values("accuracy/p90")[-1] == spread(by_client)["accuracy"]["p90"]
    tuned = build_client_eval(model, training, fine_tuning="sgd")
    with pytest.raises(errors.ConfigError, match="a state and one data set of each"):
        run(training, data, num_rounds=1, evaluate=tuned, validation_data=data)


def test_what_has_no_evaluation_or_spread_is_refused() -> None:
    model, other = build_linear(3, 0)[1], build_linear(3, 0)[1]
    keras_model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(3)])
    wide = Model.from_keras(keras_model, loss="sparse_categorical_crossentropy")
    training = build_fed_avg(model, keras.optimizers.SGD(0.1))
    one = {"loss": 1.0, "num_examples": 1}
    calls: list[tuple[Any, str]] = [
        (lambda: build_fed_eval({"a": other, "b": wide}), "one `data_type`"),
        (lambda: build_fed_eval({}), "one model with `training`"),
        (lambda: build_fed_eval({"a": model}, training), "one model with `training`"),
        (lambda: build_fed_eval(wide, training), r"of that one, `training\.model`"),
        (lambda: build_client_eval(wide, training), r"of that one, `training\.model`"),
        *(
            (lambda share=share: spread([one], share=share), "`share` above 0")
            for share in (0, 1.5, float("nan"))
        ),
        (lambda: spread([one], percentiles=[101]), "`percentiles` from 0 to 100"),
        (lambda: spread([one | {"num_examples": 0}]), "clients with examples"),
        (lambda: spread(iter([])), "found 0 clients"),
    ]

    for call, match in calls:
        with pytest.raises(errors.ConfigError, match=match):
            call()
