"""Variables of client work as values: the bits of variables, and no variable left."""

# pyright: reportArgumentType=false, reportUnknownLambdaType=false

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.tensorflow.lowering as lowering
import ray_fed.tensorflow.lowering.variables as variables
from ray_fed import tensorflow as rtf
from ray_fed.plan.plans import Fallback
from tests.tensorflow.lowering.test_lowering import (
    BATCHED,
    F32,
    VECTORS,
    batched,
    feeds_of,
    load,
    lower,
    numbers,
    ops_of,
    run_lowered,
    run_written,
    vectors,
)

Comp = Any

COMPUTATIONS: dict[str, tuple[Callable[[], Comp], Any]] = {}
"""By name: a computation whose variables become values, and its argument."""


def case(argument: Any, *types: Any) -> Callable[[Callable[..., Any]], Any]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        name = fn.__name__.replace("_", " ")
        make = functools.cache(lambda: rtf.computation(fn, *types))
        COMPUTATIONS[name] = make, argument
        return fn

    return register


def variable(value: Any, **settings: Any) -> Any:
    return tf.Variable(value, **settings)


@case(numbers(5), F32)
def reads_between_assignments(ds: Any) -> Any:
    a = variable(1.5)
    first = a.read_value()
    a.assign(first / 3.0)
    second = a.read_value()
    a.assign_add(ds.reduce(0.0, lambda s, x: s + x * a))
    a.assign_sub(second)
    return first, second, a


@case(np.float32(0.7), np.float32)
def constants_across_assignments(x: Any) -> Any:
    a = variable(0.1)
    a.assign(a * 0.3)
    a.assign(a * x)
    b = variable(x * 0.1)
    b.assign(b * 0.3)
    b.assign(b / 3.0)
    return a, b, b / 7.0


@case(numbers(6), F32)
def assignments_in_a_reduce(ds: Any) -> Any:
    total, steps = variable(0.0), variable(tf.constant(0, tf.int64))

    def step(state: Any, x: Any) -> Any:
        total.assign(total * 0.9 + x)
        steps.assign_add(1)
        return state * 0.5 + total * tf.cast(steps, tf.float32)

    return ds.reduce(0.0, step), total, steps


@case([], F32)
def assignments_in_a_reduce_of_nothing(ds: Any) -> Any:
    total = variable(2.5)

    def step(state: Any, x: Any) -> Any:
        total.assign_add(x)
        return state + total

    return ds.reduce(0.0, step), total


@case(numbers(7), F32)
def assignments_in_two_loops_around_each_other(ds: Any) -> Any:
    outer, inner = variable(0.0), variable(1.0)

    def step(state: Any, batch: Any) -> Any:
        inner.assign(1.0)
        for _ in tf.range(3):
            inner.assign(inner * 0.5 + tf.reduce_sum(batch))
            if inner > 1.0:
                outer.assign_add(inner)
        return state + inner

    return ds.batch(2).reduce(0.0, step), outer, inner


@case(np.int32(5), np.int32)
def loops_and_branches(n: Any) -> Any:
    a, b, unused = variable(1.0), variable(tf.constant(3, tf.int64)), variable(7)
    for i in tf.range(n):
        if i % 2 == 0:
            a.assign(a / 3.0 + tf.cast(i, tf.float32))
        else:
            b.assign_add(tf.cast(i, tf.int64))
        a.assign_sub(tf.cast(b, tf.float32) * 0.1)
    while b < 100:
        b.assign(b * 2)
    return a, b, unused


@case(np.int32(1), np.int32)
def cases_of_a_switch(n: Any) -> Any:
    a, b = variable(1.0), variable(2.0)
    branches = [lambda: a.assign(5.0), lambda: b.assign_add(a), lambda: a.assign_sub(b)]
    chosen = tf.switch_case(n, branches)
    return a, b, chosen


@case(numbers(5), F32)
def functions_that_call_functions(ds: Any) -> Any:
    a = variable(1.0)

    @tf.function
    def halve() -> Any:
        return a.assign(a * 0.3)

    @tf.function
    def add(x: Any) -> Any:
        a.assign_add(x)
        return halve() + a

    def step(state: Any, x: Any) -> Any:
        return state + tf.ensure_shape(add(x), [])

    return ds.reduce(0.0, step), add(2.0), a


@case(numbers(5), F32)
def rows_by_index(ds: Any) -> Any:
    table = variable(tf.reshape(tf.range(12.0), [4, 3]) / 7.0)

    def step(state: Any, x: Any) -> Any:
        rows = tf.constant([1, 3, 1])
        update = tf.fill([3, 3], x)
        table.scatter_add(tf.IndexedSlices(update, rows))
        table.scatter_sub(tf.IndexedSlices(update, [0, 0, 2]))
        table.scatter_max(tf.IndexedSlices(update[:1], [2]))
        table.scatter_min(tf.IndexedSlices(update[:1], [3]))
        table.scatter_update(tf.IndexedSlices(update[:1], [0]))
        table.scatter_nd_add([[0, 1], [3, 2]], [x, x])
        table.scatter_nd_update([[1, 1]], [x])
        table.scatter_nd_sub([[0, 1], [0, 1]], [x, 2.0])
        table[1:3, 0].assign(tf.stack([x, -x]))
        read = tf.gather(table, rows) * table.sparse_read([2])
        return state + tf.reduce_sum(read) + table.gather_nd([1, 2])

    return ds.reduce(0.0, step), table, tf.shape(table)


@case(vectors(6), VECTORS)
def batches_of_any_shape(ds: Any) -> Any:
    last = variable(tf.zeros([0, 3]), shape=tf.TensorShape([None, 3]))
    whole = variable(0.0, shape=tf.TensorShape(None), validate_shape=False)

    def step(state: Any, batch: Any) -> Any:
        before = tf.reduce_sum(last)
        last.assign(batch)
        return state + before

    total = ds.batch(4).reduce(0.0, step)
    whole.assign(tf.fill([2, 2], total))
    return total, last, tf.shape(last), whole


@case(np.float32(0.3), np.float32)
def checks_between_assignments(x: Any) -> Any:
    a = variable(1.0)
    a.assign_add(x)
    tf.debugging.assert_positive(a)
    a.assign_add(x)
    return a


@case((np.float32(0.3), True), np.float32, np.bool_)
def checks_in_branches(x: Any, flag: Any) -> Any:
    a = variable(1.0)
    if flag:
        tf.debugging.assert_positive(a)
    if flag:
        a.assign_add(x)
        tf.debugging.assert_positive(a)
    for _ in tf.range(2):
        tf.debugging.assert_positive(a)
        a.assign_add(x)
    return a


@case(np.float32(0.3), np.float32)
def initial_values_of_initial_values(x: Any) -> Any:
    a = variable(x * 3.0)
    b = variable(a * 2.0)
    a.assign(b / 3.0)
    return a, b


def _least_squares(weights: Any, batch: Any) -> Any:
    predicted = tf.linalg.matvec(batch["x"], weights)
    return tf.reduce_mean((predicted - tf.cast(batch["y"], tf.float32)) ** 2)


def _trained(apply: Callable[[Any, Any], Any], *others: Any) -> Callable[[Any], Any]:
    def train(ds: Any) -> Any:
        weights = variable([0.1, -0.2, 0.3])
        slots = [variable(other) for other in others]

        def step(state: Any, batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _least_squares(weights, batch)
            apply([weights, *slots], tape.gradient(loss, weights))
            return state + loss

        return ds.reduce(0.0, step), weights, *slots

    return train


def _apply(op: Any, **settings: Any) -> Callable[[Any, Any], Any]:
    def apply(variables: Any, gradient: Any) -> Any:
        names = ["var", "accum"] if "momentum" in settings else ["var", "m", "v"]
        named = {
            name: each.handle for name, each in zip(names, variables, strict=False)
        }
        key = "delta" if "alpha" in settings else "grad"
        op(**named, **{key: gradient}, **settings)

    return apply


for _nesterov in (False, True):
    for _name, _function in {
        "momentum": tf.raw_ops.ResourceApplyMomentum,
        "keras momentum": tf.raw_ops.ResourceApplyKerasMomentum,
    }.items():
        _step = _apply(_function, lr=0.1, momentum=0.9, use_nesterov=_nesterov)
        case(batched(4, 4, 2), BATCHED)(_trained(_step, [0.0] * 3))
        COMPUTATIONS[f"{_name} nesterov {_nesterov}"] = COMPUTATIONS.pop("train")
    _adam = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "lr": 0.1}
    _adam |= {"beta1_power": 0.9, "beta2_power": 0.99, "use_nesterov": _nesterov}
    _step = _apply(tf.raw_ops.ResourceApplyAdam, **_adam)
    case(batched(4, 4, 2), BATCHED)(_trained(_step, [0.0] * 3, [0.0] * 3))
    COMPUTATIONS[f"adam nesterov {_nesterov}"] = COMPUTATIONS.pop("train")
case(batched(4, 4, 2), BATCHED)(
    _trained(_apply(tf.raw_ops.ResourceApplyGradientDescent, alpha=0.1))
)
COMPUTATIONS["gradient descent"] = COMPUTATIONS.pop("train")


def _keras_optimizer(make: Callable[[], Any]) -> Callable[[Any], Any]:
    def train(ds: Any) -> Any:
        weights = variable([0.1, -0.2, 0.3])
        optimizer = make()
        optimizer.build([weights])

        def step(state: Any, batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _least_squares(weights, batch)
            optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
            return state + loss

        total = ds.reduce(0.0, step)
        return total, weights, *(each.value for each in optimizer.variables)

    return train


for _name, _make in {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "SGD with momentum": lambda: keras.optimizers.SGD(0.1, 0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.1, clipnorm=0.5),
    "a schedule": lambda: keras.optimizers.RMSprop(
        keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.3, 0.2, 0.1])
    ),
    "gradient accumulation": lambda: keras.optimizers.SGD(
        0.1, gradient_accumulation_steps=2
    ),
    "moving averages": lambda: keras.optimizers.Adam(
        0.1, use_ema=True, ema_overwrite_frequency=2
    ),
}.items():
    case(batched(4, 4, 2), BATCHED)(_keras_optimizer(_make))
    COMPUTATIONS[f"Keras {_name}"] = COMPUTATIONS.pop("train")


def is_of_variables(op: str) -> bool:
    return "Variable" in op or "VarHandle" in op or op.startswith("Resource")


def run_with_variables(
    comp: Comp, argument: Any, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return the results of a computation whose variables stay variables."""
    with monkeypatch.context() as patch:
        patch.setattr(lowering, "_has_values", lambda *_, **__: False)
        lowered = lower(comp)
    if isinstance(lowered, Fallback):
        return run_written(comp, argument)
    assert list(filter(is_of_variables, ops_of(lowered.graph_def)))
    feeds = list(feeds_of(argument, comp.type_signature.parameter))
    return [tensor.numpy() for tensor in load(lowered)(feeds)]


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_values_have_the_bits_of_variables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, argument = COMPUTATIONS[name]
    comp = make()
    lowered = lower(comp)

    assert isinstance(lowered, lowering.Lowered), lowered
    assert lowered.kept_variables is None
    assert not list(filter(is_of_variables, ops_of(lowered.graph_def)))
    expected = run_with_variables(comp, argument, monkeypatch)
    for value, wanted in zip(run_lowered(comp, argument), expected, strict=True):
        np.testing.assert_array_equal(value, wanted)


def of_a_map(ds: Any) -> Any:
    count = variable(0.0)
    ds = ds.map(lambda x: x + count.assign_add(1.0))
    return ds.reduce(0.0, lambda s, x: s * 0.9 + x)


def in_a_loop_with_a_break(ds: Any) -> Any:
    total = variable(0.0)
    for x in ds:
        if x > 1.0:
            break
        total.assign_add(x)
    return total


def of_random_numbers(ds: Any) -> Any:
    noise = variable(tf.random.uniform([]))
    return ds.reduce(0.0, lambda s, x: s + x) + noise * 0.0


def of_a_generator(ds: Any) -> Any:
    generator = tf.random.Generator.from_seed(1)
    return ds.reduce(0.0, lambda s, x: s + x + generator.normal([]))


def of_a_function(ds: Any) -> Any:
    made: list[Any] = []

    @tf.function
    def add(x: Any) -> Any:
        if not made:
            made.append(variable(2.0))
        return made[0].assign_add(x)

    return add(1.0) + ds.reduce(0.0, lambda s, x: s + x)


def that_grow_in_a_loop(ds: Any) -> Any:
    rows = variable(tf.zeros([1]), shape=tf.TensorShape(None), validate_shape=False)

    def step(state: Any, x: Any) -> Any:
        rows.assign(tf.concat([rows, [x]], 0))
        return state + tf.reduce_sum(rows)

    return ds.reduce(0.0, step), rows


def without_an_initial_value(ds: Any) -> Any:
    total = ds.reduce(0.0, lambda s, x: s + x)
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="later")

    @tf.function
    def choose() -> Any:
        if total > 0.0:
            tf.raw_ops.AssignVariableOp(resource=handle, value=total)
        else:
            tf.raw_ops.AssignVariableOp(resource=handle, value=-total)
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    return choose()


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (of_a_map, "MapDataset of an iterator or variable"),
        (in_a_loop_with_a_break, "ScanDataset of an iterator or variable"),
        (of_random_numbers, "a variable whose initial value is random"),
        (of_a_generator, "RngReadAndSkip"),
        (of_a_function, "a variable that is read before it is initialized"),
        (
            without_an_initial_value,
            "a variable that is initialized in a loop or branch",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_variables_without_a_rule_stay_variables(
    fn: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    comp, argument = rtf.computation(fn, F32), [0.5, -0.25, 2.0, 4.0]

    lowered = lower(comp)

    if isinstance(lowered, lowering.Lowered):
        assert lowered.kept_variables == reason
        found = run_lowered(comp, argument)
        if fn is not of_random_numbers:
            assert found == run_with_variables(comp, argument, monkeypatch)


@pytest.mark.parametrize("isolated", [True, False])
def test_conditions_that_sums_show_are_left_out(isolated: bool) -> None:
    def guarded(x: Any) -> Any:
        finite = variables.shown_by_sums(tf.math.is_finite(x))
        with tf.control_dependencies([tf.debugging.Assert(finite, ["broken"])]):
            return tf.where(finite, x, 0.0)

    comp = rtf.computation(guarded, np.float32)
    message = comp.to_proto().tensorflow
    lowered = lowering.lower(message, comp.type_signature, isolated=isolated)
    assert isinstance(lowered, lowering.Lowered)

    assert variables.trust_sums(lowered.graph_def)

    assert "Assert" not in ops_of(lowered.graph_def)
    [found] = load(lowered)([tf.constant(np.inf)])
    assert found == np.inf


def test_shape_of_a_variable_changes_in_a_loop() -> None:
    comp = rtf.computation(that_grow_in_a_loop, F32)

    found, wanted = (run(comp, numbers(4)) for run in (run_lowered, run_written))

    assert found[1].shape == (5,)
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(value, expected)
