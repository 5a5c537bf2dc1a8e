"""Every optimizer of Keras, with every argument, trains as Keras' own `fit` does."""

# pyright: reportUnknownLambdaType=false

import inspect
import warnings
from collections.abc import Callable
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import learning
from ray_fed.learning.optimizers import OptimizerSpec

SGD: Any = keras.optimizers.SGD  # whose stub knows a float alone as the rate
NUM_STEPS = 3
RNG = np.random.default_rng(0)
BATCHES: list[dict[str, Any]] = [
    {
        "x": RNG.integers(0, 5, (4, 3)).astype(np.int32),
        "y": RNG.normal(size=(4, 1)),
    }
    for _ in range(NUM_STEPS)
]


def build_keras_model(first: str = "dense", dtype: str = "float64") -> keras.Model:
    """Return a model with weights of one and two dimensions, one named embedding.

    Args:
        first: "sparse" for an embedding indeed, whose gradient is of rows alone.
        dtype: of weights; by default one in which no rounding shows, though optimizers
            divide by small numbers.
    """
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            *(
                [
                    layers.Embedding(5, 4, dtype=dtype, name="embedding"),
                    layers.Flatten(dtype=dtype),
                ]
                if first == "sparse"
                else [layers.Dense(6, dtype=dtype, name="embedding")]
            ),
            layers.Dense(4, dtype=dtype, name="hidden"),
            layers.Dense(1, bias_initializer="ones", dtype=dtype, name="last"),
        ],
        name="net",
    )


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of one's own, without a config."""

    @override
    def __call__(self, step: Any) -> Any:
        number: Any = keras.ops.cast(step, "float32")
        return 0.1 / (1.0 + number)


class Scaled(keras.optimizers.SGD):
    """An optimizer of one's own, whose config lacks its argument."""

    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    @override
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.factor, variable, learning_rate)


def find_classes() -> list[type[keras.optimizers.Optimizer]]:
    """Return the optimizers of this Keras that update weights themselves."""
    delegating = {keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer}
    delegating.add(keras.optimizers.MultiOptimizer)
    return sorted(
        {
            value
            for value in vars(keras.optimizers).values()
            if inspect.isclass(value)
            and issubclass(value, keras.optimizers.Optimizer)
            and value not in delegating
        },
        key=lambda cls: cls.__name__,
    )


class Tripled(keras.optimizers.SGD):
    """An optimizer that overrides what `fit` calls first."""

    @override
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(3 * g, v) for g, v in grads_and_vars])


class Tuned(Schedule):
    """A schedule with a variable of its own."""

    def __init__(self) -> None:
        self.rate = keras.Variable(0.1)


ARGUMENTS: dict[str, Any] = {
    "learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
    "weight_decay": 0.1, "clipnorm": 0.05, "clipvalue": 0.02, "global_clipnorm": 0.05,
    "use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2,
    "loss_scale_factor": 8.0, "gradient_accumulation_steps": 2, "momentum": 0.8,
    "nesterov": True, "rho": 0.7, "epsilon": 0.01, "centered": True, "beta_1": 0.6,
    "beta_2": 0.7, "beta_2_decay": -0.5, "epsilon_1": 1e-3, "epsilon_2": 1e-2,
    "clip_threshold": 0.5, "relative_step": False, "amsgrad": True,
    "initial_accumulator_value": 0.3, "learning_rate_power": -0.7,
    "l1_regularization_strength": 0.01, "l2_regularization_strength": 0.01,
    "l2_shrinkage_regularization_strength": 0.01, "beta": 0.1, "adam_beta_1": 0.6,
    "adam_beta_2": 0.7, "adam_weight_decay": 0.2, "exclude_layers": ["hidden"],
    "exclude_embeddings": False, "muon_a": 3.0, "muon_b": -4.0, "muon_c": 2.1,
    "adam_lr_ratio": 0.5, "ns_steps": 2, "rms_rate": 0.4, "warmup_steps": 2,
}  # fmt: skip
NEEDED = {
    "ema_momentum": {"use_ema": True},
    "ema_overwrite_frequency": {"use_ema": True},
    "nesterov": {"momentum": 0.9},
}
"""Arguments without which another one does nothing."""


ALONE = {"weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema"}
"""Arguments that exclude one another, or hide what others do."""


def arguments_of(cls: type) -> dict[str, Any]:
    """Return the arguments of a class, each with a value that is not its default."""
    parameters = inspect.signature(cls.__init__).parameters
    names = set(parameters) - {"self", "name", "kwargs"}
    return {name: ARGUMENTS[name] for name in sorted(names)}


def expect_weights(found: Any, expected: Any, initial: Any) -> None:
    """Raise unless weights are those expected, and some of them moved."""
    for weight, wanted in zip(found, expected, strict=True):
        tolerance = 1e-6 if wanted.dtype == np.float64 else 1e-5
        np.testing.assert_allclose(weight, wanted, rtol=tolerance, atol=tolerance)
    moves = [np.max(np.abs(w - i)) for w, i in zip(expected, initial, strict=True)]
    assert max(moves) > 1e-4


def train(optimizer: Any, keras_model: keras.Model) -> Any:
    """Return the weights after a client's batches, with an optimizer of clients."""
    model = learning.Model.from_keras(keras_model, loss="mse")
    dtype = keras_model.trainable_variables[0].dtype
    # Labels are as a loss by name takes them.
    batches = [{"x": b["x"], "y": b["y"][:, 0].astype(dtype)} for b in BATCHES]
    process = learning.build_fed_avg(model, optimizer)
    state, _ = process.next(process.initialize(), [batches])
    return state.weights.trainable


def fit(optimizer: Any, keras_model: Any) -> Any:
    """Return the weights that Keras gets in one pass over all batches."""
    keras_model.compile(optimizer, "mse", run_eagerly=True)
    x, y = (np.concatenate([batch[key] for batch in BATCHES]) for key in "xy")
    keras_model.fit(x, y, batch_size=len(BATCHES[0]["x"]), shuffle=False, verbose=0)
    return keras_model.get_weights()


def dtype_of(cls: type) -> str:
    """Return the dtype to test an optimizer in: Muon cannot do float64."""
    return "float32" if cls is keras.optimizers.Muon else "float64"


def expect_as_fit(make: Callable[[keras.Model], Any], **kwargs: str) -> None:
    """Raise unless an optimizer trains as in Keras.

    Args:
        make: of the model that it trains, so that it may exclude some of its weights.
        **kwargs: for `build_keras_model`.
    """
    ours, theirs = build_keras_model(**kwargs), build_keras_model(**kwargs)
    initial = theirs.get_weights()

    found = train(make(ours), ours)

    expect_weights(found, fit(make(theirs), theirs), initial)


@pytest.mark.parametrize(
    "cls",
    [
        keras.optimizers.Muon,
        pytest.param(keras.optimizers.ScheduleFreeAdamW, marks=pytest.mark.slow),
    ],
)
def test_optimizer_trains_as_keras_fits(cls: Any) -> None:
    expect_as_fit(lambda _: cls(0.1), first="sparse", dtype=dtype_of(cls))


@pytest.mark.slow
@pytest.mark.parametrize("cls", find_classes(), ids=lambda cls: cls.__name__)
def test_arguments_do_what_they_do_in_keras(cls: Any) -> None:
    # Not by rounds: as many arguments would be as many compiled processes.
    together = {n: v for n, v in arguments_of(cls).items() if n not in ALONE}
    cases = {"together": together | {"weight_decay": 0.1, "clipnorm": 0.5}}
    if cls is SGD:  # each of those that all classes share, alone
        cases |= {
            name: {"learning_rate": 0.1} | NEEDED.get(name, {}) | {name: value}
            for name, value in arguments_of(cls).items()
        }
    keras_model = build_keras_model(dtype=dtype_of(cls))
    model = learning.Model.from_keras(keras_model, loss="mse")
    initial = model.initial_weights().trainable
    steps: list[list[Any]] = [
        [RNG.normal(size=weight.shape).astype(weight.dtype) for weight in initial[:-1]]
        + [None]  # the loss does not depend on the last bias
        for _ in range(3)
    ]
    specs = {name: OptimizerSpec(cls(**kwargs)) for name, kwargs in cases.items()}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist", UserWarning)
        every = {
            name: apply_steps(spec, model, initial, steps)
            for name, spec in specs.items()
        }
        expected = {
            name: apply_eagerly(cls(**kwargs), keras_model, initial, steps)
            for name, kwargs in cases.items()
        }

    for name, weights in every.items():
        expect_weights(weights, expected[name], initial)


def to_gradient(values: Any, optimizer: Any) -> Any:
    return None if values is None else optimizer.scale_loss(tf.constant(values))


def apply_steps(
    spec: OptimizerSpec, model: learning.Model, initial: Any, steps: Any
) -> Any:
    stamped = spec.stamp(model)

    @tf.function(autograph=False)
    def run() -> Any:
        stamped.start([tf.constant(weight) for weight in initial])
        if spec.rate:
            stamped.assign_rate(spec.rate.value)
        for step in steps:
            stamped.apply([to_gradient(g, stamped) for g in step])
        return stamped.finish()

    return [weight.numpy() for weight in run()]


def apply_eagerly(
    optimizer: keras.optimizers.Optimizer, keras_model: Any, initial: Any, steps: Any
) -> Any:
    keras_model.set_weights(initial)
    variables = keras_model.trainable_variables
    for step in steps:
        optimizer.apply([to_gradient(g, optimizer) for g in step], variables)
    optimizer.finalize_variable_values(variables)
    weights = keras_model.get_weights()
    keras_model.set_weights(initial)
    return weights


def excluding(**kwargs: Any) -> Callable[[keras.Model], Any]:
    def make(_: keras.Model) -> Any:
        optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(**kwargs)
        return optimizer

    return make


def excluding_variables(keras_model: keras.Model) -> Any:
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([keras_model.get_layer("last").kernel])
    return optimizer


def several(_: keras.Model) -> Any:
    mapped = {"net/hidden/.*": keras.optimizers.Adam(0.05)}
    default = keras.optimizers.SGD(0.1)
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(default, mapped)
    )


def used_before(_: keras.Model) -> Any:
    optimizer = keras.optimizers.Nadam(0.1)
    optimizer.build([keras.Variable(np.ones(2, np.float32))])
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            excluding(var_names=["^net/hidden"]),
            id="excluded paths",
            marks=pytest.mark.slow,
        ),
        pytest.param(excluding_variables, id="excluded variables"),
        pytest.param(several, id="several", marks=pytest.mark.slow),
        pytest.param(lambda _: "rmsprop", id="by name", marks=pytest.mark.slow),
        pytest.param(
            lambda _: SGD(Schedule()), id="own schedule", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda _: SGD(lambda: 0.05), id="function", marks=pytest.mark.slow
        ),
        pytest.param(lambda _: Scaled(5.0, learning_rate=0.01), id="own class"),
        pytest.param(
            lambda _: Tripled(0.1), id="own gradients", marks=pytest.mark.slow
        ),
    ],
)
def test_what_no_config_has_is_as_in_keras(make: Any) -> None:
    expect_as_fit(make)


def test_optimizer_that_was_used_before_starts_afresh() -> None:
    ours, theirs = build_keras_model(), build_keras_model()
    optimizer = used_before(ours)
    before = [variable.numpy() for variable in optimizer.variables]

    found = train(optimizer, ours)

    initial = theirs.get_weights()
    expect_weights(found, fit(keras.optimizers.Nadam(0.1), theirs), initial)
    for variable, value in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


class Counting(keras.optimizers.SGD):
    """An optimizer with a variable that its `build` does not make."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = keras.Variable(0.0)


class Remembering(keras.optimizers.SGD):
    """An optimizer that begins with a copy of the weights in its own way."""

    @override
    def build(self, variables: Any) -> None:
        super().build(variables)
        self.first = [
            cast("Any", self).add_variable(v.shape, lambda *_, v=v, **__: v.value)
            for v in variables
        ]


def averaging(make: Callable[[], Any], **more: Any) -> Callable[[Any], Any]:
    return lambda model: learning.build_fed_avg(model, make(), **more)


def among_several(optimizer: Any) -> Any:
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(optimizer))


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (
            averaging(lambda: SGD(0.1), server_optimizer=SGD(1.0, use_ema=True)),
            "`use_ema` at the server",
        ),
        (
            lambda m: learning.build_fed_sgd(m, SGD(1.0, use_ema=True)),
            "`use_ema` at the server",
        ),
        (
            lambda m: learning.build_mime_lite(m, SGD(1.0, use_ema=True)),
            "`use_ema` of Mime Lite",
        ),
        (
            lambda m: learning.build_mime_lite(
                m, SGD(1.0, gradient_accumulation_steps=2)
            ),
            "`gradient_accumulation_steps` of Mime Lite",
        ),
        (averaging(Counting), "`count`"),
        (averaging(lambda: SGD(Tuned())), "`Tuned` with the variable `rate`"),
        (averaging(Remembering), "`Remembering`, whose `build`"),
        (
            averaging(lambda: among_several(keras.optimizers.ScheduleFreeAdamW())),
            "ScheduleFreeAdamW",
        ),
        (
            averaging(lambda: keras.optimizers.MultiOptimizer(lambda _: SGD(0.1))),
            "OptimizerMap",
        ),
        (
            averaging(lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1))),
            "LossScaleOptimizer",
        ),
        (averaging(lambda: "sdg"), "`sdg`"),
        (
            averaging(lambda: SGD(Schedule()), client_learning_rate=Schedule()),
            "client_learning_rate",
        ),
    ],
)
def test_what_cannot_be_as_in_keras_is_refused(build: Any, named: str) -> None:
    model = learning.Model.from_keras(build_keras_model(), loss="mse")

    with pytest.raises(errors.ValueMismatchError) as caught:
        build(model)

    assert named in str(caught.value)
