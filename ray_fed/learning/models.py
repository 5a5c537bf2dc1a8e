"""A Keras 3 model as pure functions of its weights, which clients train and evaluate.

ray_fed reads the user's Keras model but never writes to it. Its layers run in a
`keras.StatelessScope`, on weights that come from the server and return to it.

A variable that is neither trained nor changed by a batch is the same in every round.
Examples are the weights of a frozen layer, and a kernel under LoRA adapters. These
variables are part of neither the server's state nor an update. They are constants of
the graphs that use them. The workers of a machine share one copy of a large constant.

Keras keeps a seed and a count in each random layer (`SeedGenerator`) and counts each
draw. ray_fed adds a key to the seed, so that clients, rounds and calls draw different
numbers:

    at the server           [seed, 0]                  as the layer was made
    at a client             [seed, 0] + key            before its first batch
    after n draws           [seed, 0] + key + [0, n]   by Keras

The key is a random number that depends on the run's seed, the call (and so the round),
the client, and the position in the computation. As in Keras, layers with the same seed
draw the same numbers. `ray_fed.tensorflow.keras_seeds` adds keys to Keras' draws
outside of models.
"""

import contextlib
import functools
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context  # no public name
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.learning.checks import expect_object
from ray_fed.learning.objectives import (
    Loss,
    Metrics,
    Output,
    Totals,
    TotalsKeeper,
    build_outputs,
)
from ray_fed.learning.tensors import widened
from ray_fed.observability import reprs
from ray_fed.tensorflow import keras_seeds, trace_keys
from ray_fed.tensorflow.traced_graph import Constant

# pyright: reportPrivateUsage=false


def copy_model(model: keras.Model) -> tuple[keras.Model, dict[int, Any]]:
    """Copy a functional model, and return the copy and its variables by original `id`.

    A layer with variables is made again from its config. Then the values that the
    original layer saves are loaded into it. Other layers are shallow copies. Raises
    ValueMismatchError, with the layer's name, if a config does not describe the layer.
    """
    pairs: list[tuple[Any, Any]] = []

    def copy_layer(layer: Any) -> Any:
        if not getattr(layer, "variables", None):
            return _twin(layer)
        copied = _remake(layer)
        pairs.append((layer, copied))
        return copied

    copied: Any = keras.models.clone_model(
        model, clone_function=copy_layer, recursive=True
    )
    if not copied.built:  # a Sequential without an Input
        copied.build(model.input_shape)
    copies: dict[int, Any] = {}
    for layer, layer_copy in pairs:
        _load(layer, layer_copy)
        for variable, variable_copy in zip(
            layer.variables, layer_copy.variables, strict=True
        ):
            copies[id(variable)] = variable_copy
            variable_copy.trainable = variable.trainable
    return copied, copies


def _twin(layer: Any) -> Any:
    """Return a shallow copy of a layer without variables, for a second model."""
    twin = object.__new__(type(layer))
    vars(twin).update(vars(layer))
    vars(twin).update(_inbound_nodes=[], _outbound_nodes=[])
    return twin


def _remake(layer: Any) -> Any:
    # The config may name the user's functions and classes, which Keras does not know.
    custom: dict[str, Any] = {}
    for inner in layer._flatten_layers():
        for value in (type(inner), *vars(inner).values()):
            named = value if hasattr(value, "__name__") else type(value)
            custom[named.__name__] = named
    try:
        with keras.utils.custom_object_scope(custom):
            return type(layer).from_config(layer.get_config())
    except Exception as error:
        raise _lost(layer, f"{type(error).__name__}: {error}") from error


def _load(layer: Any, copied: Any) -> None:
    for original, remade in zip(
        layer._flatten_layers(), copied._flatten_layers(), strict=True
    ):
        # The config of an outer layer does not include `enable_lora` of inner layers.
        if getattr(original, "lora_enabled", False) and not remade.lora_enabled:
            remade.enable_lora(original.lora_rank, original.lora_alpha)
    if [v.shape for v in layer.variables] != [v.shape for v in copied.variables]:
        raise _lost(layer, "other variables")
    for original, remade in zip(
        layer._flatten_layers(), copied._flatten_layers(), strict=True
    ):
        if not type(original).__module__.startswith("keras."):
            _check_settings(original, remade)
        store: dict[str, Any] = {}
        original.save_own_variables(store)
        remade.load_own_variables(store)


def _check_settings(original: Any, remade: Any) -> None:
    """Raise if a layer of a user's class lost a setting when it was made again.

    Inner layers and variables are compared elsewhere. Attributes of Keras are not
    compared.
    """
    plain = keras.layers.Layer(name="plain"), keras.Model(name="plain")
    by_keras = {name for layer in plain for name in vars(layer)}
    by_keras |= {"_build_shapes_dict", "_functional"}
    for name, value in vars(original).items():
        if name in by_keras or name.startswith("_self_"):  # TensorFlow's tracking
            continue
        now = getattr(remade, name, None)
        if not _is_alike(value, now):
            raise _lost(
                original,
                f"`{name}` of `{reprs.shorten(str(now))}`, not"
                f" `{reprs.shorten(str(value))}`",
            )


_COMPARED_ELSEWHERE = (
    keras.layers.Layer,
    keras.Variable,
    keras.metrics.Metric,
    keras.random.SeedGenerator,
    types.ModuleType,
)
_DEEPEST = 20


def _is_alike(one: Any, other: Any, depth: int = 0) -> bool:
    """Return whether an attribute of a layer and of its copy have the same meaning."""
    if one is other or depth > _DEEPEST or isinstance(one, _COMPARED_ELSEWHERE):
        return True
    if isinstance(one, tf.Tensor | np.ndarray | np.generic | numbers.Number):
        # A config has Python's lists and numbers instead of arrays.
        with contextlib.suppress(ValueError, TypeError):
            arrays = np.asarray(one), np.asarray(other)
            kinds = {array.dtype.kind for array in arrays}
            return np.array_equal(*arrays, equal_nan=kinds <= set("fc"))
        return False
    mine, its = _parts_of(one), _parts_of(other)
    if mine is None or its is None:
        return bool(one == other)
    return (
        mine[0] == its[0]
        and len(mine[1]) == len(its[1])
        and all(
            _is_alike(this, that, depth + 1)
            for this, that in zip(mine[1], its[1], strict=True)
        )
    )


def _parts_of(value: Any) -> tuple[Any, list[Any]] | None:
    """Return the parts of a value, so that two values can be compared part by part.

    The first part is compared by `==`, and the others recursively. The result is None
    if `==` compares the whole value.
    """
    match value:
        case list() | tuple():
            return list, list(cast("Sequence[Any]", value))
        case Mapping():
            named = cast("Mapping[Any, Any]", value)
            keys = sorted(named, key=repr)
            return keys, [named[key] for key in keys]
        case types.FunctionType():
            cells = map(_content, value.__closure__ or ())
            return value.__code__, [value.__defaults__, value.__kwdefaults__, *cells]
        case types.MethodType():
            return types.MethodType, [value.__func__]
        case functools.partial():
            return functools.partial, [value.func, value.args, value.keywords]
        case _ if hasattr(value, "get_config"):
            return type(value), [value.get_config()]
        case _ if type(value).__eq__ is not object.__eq__:
            return None
        case _:
            return type(value), [getattr(value, "__dict__", None)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable of the closure is not assigned yet
        return None


def _lost(layer: Any, found: str) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        "Expected a layer that is made again from its config, found"
        f" `{type(layer).__name__}` named `{layer.name}`, whose config gave {found}:"
        " return all arguments of its `__init__` from `get_config`. Or set the weights"
        " of your own model: `for v, value in zip(keras_model.trainable_variables,"
        " state.weights.trainable): v.assign(value)`."
    )


_SEED_NAME = "seed_generator_state"
"""Keras' name for the variable from which a random layer draws."""


class ModelWeights(NamedTuple):
    """The weights of a model, in the order of the Keras model.

    Attributes:
        trainable: Values of `keras_model.trainable_variables`.
        non_trainable: Values of the `keras_model.non_trainable_variables` that a batch
            changes. These are running statistics, such as the mean and variance of
            `BatchNormalization`, and the seeds of random layers. Other variables are
            constants, see `Model.from_keras`.
    """

    trainable: tuple[Any, ...]
    non_trainable: tuple[Any, ...]

    @override
    def __repr__(self) -> str:
        counts = f"{len(self.trainable)} trainable, {len(self.non_trainable)} other"
        return f"<weights: {counts} variables>"


class Delta(NamedTuple):
    """The change of weights: the client's weights minus the server's.

    Attributes:
        trainable: Changes of the trainable weights.
        statistics: Changes of the non-trainable weights at `Model.statistics_indices`.
            Changes of whole numbers are float32.
    """

    trainable: tuple[Any, ...]
    statistics: tuple[Any, ...]


def expect_delta(value: object) -> None:
    """Raise ValueMismatchError unless a value has the fields of a `Delta`."""
    if not (hasattr(value, "trainable") and hasattr(value, "statistics")):
        is_weights = isinstance(value, ModelWeights)
        raise errors.ValueMismatchError(
            "Expected a change of weights, a `Delta`, found"
            f" {'weights' if is_weights else errors.describe(value)}: return"
            " `model.delta(server.weights, weights)` first from the function of a"
            " client, and the same structure from an aggregator."
        )


class FullGradient(NamedTuple):
    """The result of `Model.full_gradient`: the gradient over a client's data.

    Attributes:
        trainable: Gradient of the mean loss, in the dtypes of the weights. It is zero
            if there are no examples.
        non_trainable: Non-trainable weights after the pass.
        totals: Totals of all examples.
    """

    trainable: tuple[Any, ...]
    non_trainable: tuple[Any, ...]
    totals: Totals


class ForwardPass(NamedTuple):
    """The result of running a model on one batch.

    Attributes:
        loss: Mean loss of the batch, f32[], with the penalties of layers.
        weights: Weights after the batch. Trainable weights change only if a layer
            writes to them in its `call`, as `keras.layers.SpectralNormalization` does.
        writes: Whether a layer wrote to trainable weights.
        totals: Totals of this batch and the batches before it.
    """

    loss: Any
    weights: ModelWeights
    writes: bool
    totals: Totals


class Model:
    """A functional Keras model with its loss and metrics. Build it with `from_keras`.

    Attributes:
        trainable_variables: Trainable variables of the Keras model.
        weights_type: Type of the model's `ModelWeights`.
        batch_type: Type of one batch, such as `<x=f32[?, ...], y=i32[?]>` for a
            classifier.
        data_type: Type of all clients' data, `{<x=..., y=...>*}@CLIENTS`.
        totals: Object that adds batches to totals and computes metrics from them.
    """

    def __init__(self, keras_model: keras.Model, outputs: Sequence[Output]) -> None:
        self._keras = keras_model
        self._outputs = tuple(outputs)
        self.trainable_variables = tuple(keras_model.trainable_variables)
        inputs = {
            name: _tensor_type(tensor.dtype, tensor.shape)
            for name, tensor in _named(keras_model, "input").items()
        }
        labels = {output.name: output.label_type for output in outputs}
        self.batch_type = fl.StructWithPythonType(
            [("x", _struct_of(inputs)), ("y", _struct_of(labels))], dict
        )
        self.data_type = fl.FederatedType(fl.SequenceType(self.batch_type), fl.CLIENTS)
        others: list[Any] = keras_model.non_trainable_variables
        unseeded = [v for v in others if v.name != _SEED_NAME]
        written = self._find_written(unseeded, training=True)
        constant = {id(v) for v in unseeded if id(v) not in written}
        self._others = tuple(v for v in others if id(v) not in constant)
        # A variable's tensor shares its memory until the variable gets a new value.
        self._constants = [
            (v, Constant(tf.convert_to_tensor(v))) for v in others if id(v) in constant
        ]
        self.weights_type = fl.to_type(
            ModelWeights(
                _types_of(self.trainable_variables),
                _types_of(self._others),
            )
        )
        self.totals = TotalsKeeper(outputs)

    @override
    def __repr__(self) -> str:
        taken = reprs.shorten(str(self.batch_type))
        return f"<model {self.describe()}, batches {taken}>"

    def describe(self) -> str:
        """Return the name and the number of parameters, as text."""
        count = self._keras.count_params()
        return f"`{self._keras.name}` of {count:,} parameters"

    def describe_for_graphs(self) -> Any:
        """Return the settings that graphs depend on. Equal models share graphs."""
        layers = cast("Any", self._keras)._flatten_layers()
        # Private attributes are left out, because a call of a layer may change them.
        settings = [trace_keys.settings_of(layer, public=True) for layer in layers]
        return [
            trace_keys.describe_keras(self._keras),
            settings,
            [v.path for v in (*self.trainable_variables, *self._others)],
            [constant.digest for _, constant in self._constants],
            self._outputs,
        ]

    @classmethod
    @tracebacks.shorten
    def from_keras(
        cls,
        keras_model: keras.Model,
        *,
        loss: Loss | Mapping[str, Loss] | None = None,
        metrics: Metrics | Mapping[str, Metrics] | None = None,
        label_type: fl.TensorType | Mapping[str, fl.TensorType] | None = None,
    ) -> "Model":
        """Return a model that trains copies of a Keras model's weights.

        A variable that is neither trained nor changed by a batch is read now and is a
        constant from then on. Examples are the weights of layers with `trainable =
        False`, and kernels under `enable_lora`. Constants are sent to each machine
        once, and its workers share them. They are part of neither the state nor the
        updates.

        Args:
            keras_model: A built, functional Keras model, which stays as it is. Call
                `ray_fed.init` before you build it, because TensorFlow fixes its number
                of threads at its first computation. If the model has several inputs or
                outputs, batches name them by the keys of their dictionary, or by the
                names of their layers.
            loss: Loss, in the forms that Keras' `compile` takes: an object, a name
                ("mse") or a function. It returns one number for a batch. For several
                outputs, pass a dictionary, whose losses are added up. None: the loss
                and the metrics that the Keras model was compiled with.
            metrics: Metrics to report, in the forms that `compile` takes: objects,
                names ("accuracy") or functions. Their variables must be sums over
                examples, as in accuracies, means and confusion counts. For several
                outputs, pass a dictionary of lists. Objects keep their values.
            label_type: Type of the labels in a batch, whose first dimension is unknown.
                For several outputs, pass a dictionary. By default, labels have the type
                of the output. For sparse losses, and for objects of a binary loss or of
                your own class, they are `int32[?]`: a class for each example.

        Raises:
            ValueMismatchError: There is no loss for an output, Keras does not know the
                loss or a metric, a metric is not a sum, or the model was compiled with
                weights of losses or of metrics.
        """
        _check_model(keras_model)
        chosen: Any = loss
        if loss is None:
            chosen, compiled_metrics = _read_compiled(keras_model)
            metrics = compiled_metrics if metrics is None else metrics
        symbolic = _named(keras_model, "output")
        outputs = build_outputs(symbolic, chosen, metrics or (), label_type)
        return cls(keras_model, outputs)

    @property
    def compiled_optimizer(self) -> keras.optimizers.Optimizer:
        """Optimizer that the Keras model was compiled with.

        Raises:
            ValueMismatchError: The Keras model was not compiled with an optimizer.
        """
        optimizer = getattr(self._keras, "optimizer", None)
        if optimizer is None:
            raise errors.ValueMismatchError(
                "Expected an optimizer for the clients, found none, and a Keras model"
                ' that is not compiled: pass one, such as `"sgd"`, or call `compile`.'
            )
        return optimizer

    def initial_weights(self) -> ModelWeights:
        """Return the Keras model's current weights, as NumPy arrays.

        This also works inside of a computation. The arrays are constants of its graph.
        """
        with context.eager_mode():
            return ModelWeights(
                tuple(v.numpy() for v in self.trainable_variables),
                tuple(v.numpy() for v in self._others),
            )

    def check_unchanged(self) -> None:
        """Check that the Keras model's constants are as `from_keras` read them.

        Raises:
            ValueMismatchError: Constants changed, or other weights are trained now.
        """
        before, now = self.trainable_variables, self._keras.trainable_variables
        if [id(v) for v in before] != [id(v) for v in now]:
            changed = "which weights are trained"
        elif not all(_is_unchanged(v, constant) for v, constant in self._constants):
            changed = "weights that are not trained"
        else:
            return
        raise errors.ValueMismatchError(
            "Expected the Keras model as `Model.from_keras` read it, found a change of"
            f" {changed}: call `from_keras` after it, say after weights are loaded."
        )

    @property
    def statistics_indices(self) -> tuple[int, ...]:
        """Indices of running statistics, such as the mean in `BatchNormalization`.

        They index `ModelWeights.non_trainable`. Clients average these weights but do
        not train them.
        """
        return tuple(i for i, v in enumerate(self._others) if v.name != _SEED_NAME)

    @property
    def statistics_variables(self) -> tuple[Any, ...]:
        """Variables of the Keras model at `statistics_indices`."""
        return tuple(self._others[index] for index in self.statistics_indices)

    def variables_of(self, layer_class: type) -> list[Any]:
        """Return the variables of all layers of a class, including inner layers."""
        layers = cast("Any", self._keras)._flatten_layers()
        chosen = [layer for layer in layers if isinstance(layer, layer_class)]
        return [variable for layer in chosen for variable in layer.variables]

    @property
    def _seed_indices(self) -> list[int]:
        return [i for i, v in enumerate(self._others) if v.name == _SEED_NAME]

    @functools.cached_property
    def _inference_seed_indices(self) -> list[int]:
        """Indices of the seeds from which layers also draw outside of training."""
        seeds = [self._others[i] for i in self._seed_indices]
        written = self._find_written(seeds, training=False)
        return [i for i in self._seed_indices if id(self._others[i]) in written]

    def reseed(self, weights: ModelWeights, *, training: bool = True) -> ModelWeights:
        """Return weights with which random layers draw new numbers.

        Call this in the function of a client. Each call draws another key. `forward`
        and `differentiate` do it themselves.

        Args:
            weights: Weights, as tensors.
            training: Whether the layers will draw as in training.
        """
        indices = self._seed_indices if training else self._inference_seed_indices
        seeded = list(weights.non_trainable)
        if indices:
            key = keras_seeds.draw_key()
            for index in indices:
                seeded[index] += tf.cast(key, seeded[index].dtype)
        return weights._replace(non_trainable=tuple(seeded))

    def _find_written(self, variables: Sequence[Any], *, training: bool) -> set[int]:
        """Return the `id`s of those `variables` that a batch changes."""
        written: set[int] = set()

        def run(inputs: Any) -> None:
            with keras_seeds.keyed_global_draws(), _KeyedScope() as scope:
                self._keras(inputs, training=training)
            changed: Callable[[Any], Any] = scope.get_current_value
            written.update(id(v) for v in variables if changed(v) is not None)

        if variables:
            specs: dict[Any, Any] = {
                name: tf.TensorSpec(tensor.shape, tensor.dtype)
                for name, tensor in _named(self._keras, "input").items()
            }
            traced: Any = tf.function(run, autograph=False)
            traced.get_concrete_function(specs.get(None, specs))
        return written

    @tf.autograph.experimental.do_not_convert
    def differentiate(
        self,
        weights: ModelWeights,
        batch: Any,
        totals: Totals,
        scale_loss: Callable[[Any], Any] = lambda loss: loss,
    ) -> tuple[list[Any], ForwardPass]:
        """Return the gradients of the loss in training, and the forward pass.

        Random layers draw other numbers in each call, for each client and round.

        Args:
            weights: Weights, as tensors.
            batch: Batch of `batch_type`, as tensors.
            totals: Totals of the batches before.
            scale_loss: Function from the loss to the number that is differentiated.

        Returns:
            One gradient for each trainable weight, a tensor of its shape. The gradient
            is zero if the loss does not depend on the weight.

        Raises:
            ValueMismatchError: The model has no trainable weights, or the loss depends
                on none of them.
        """
        weights = self.reseed(weights)
        gradients, passed = self.find_gradients(weights, batch, totals, scale_loss)
        dense = [
            tf.zeros_like(weight)
            if gradient is None
            else tf.convert_to_tensor(gradient)
            for gradient, weight in zip(gradients, weights.trainable, strict=True)
        ]
        return dense, passed

    @tf.autograph.experimental.do_not_convert
    def find_gradients(
        self,
        weights: ModelWeights,
        batch: Any,
        totals: Totals,
        scale_loss: Callable[[Any], Any] = lambda loss: loss,
    ) -> tuple[list[Any], ForwardPass]:
        """Return gradients in the form that an optimizer of Keras takes.

        `differentiate` describes arguments and errors. Random layers draw from the
        seeds in `weights`, so call `reseed` first, once for a client.

        Returns:
            One gradient for each trainable weight, with respect to its value after a
            layer wrote to it. The gradient of an embedding is an `IndexedSlices`. A
            gradient is None if the loss does not depend on the weight.
        """
        if not weights.trainable:
            raise errors.ValueMismatchError(
                f"Expected weights to train, found none in {self}: set `trainable` of"
                " a layer before `from_keras`. A frozen layer does not train its"
                " adapters either: `enable_lora` itself freezes the kernel alone."
            )
        with tf.GradientTape() as tape:
            tape.watch(weights.trainable)
            passed = self._run(weights, batch, totals, training=True, tape=tape)
            loss = scale_loss(passed.loss)
        after, before = passed.weights.trainable, weights.trainable
        # One call: a persistent tape would leave recurrent layers without a kernel.
        sources = [*after, *before] if passed.writes else list(after)
        added: list[Any] = tape.gradient(loss, sources)
        added, then = added[: len(after)], added[len(after) :]
        for i, gradient in enumerate(then):  # from reads before a layer wrote
            if after[i] is not before[i] and gradient is not None:
                added[i] = gradient if added[i] is None else added[i] + gradient
        if all(gradient is None for gradient in added):
            raise errors.ValueMismatchError(
                "Expected a loss that depends on the model's trainable weights, found"
                " one that depends on none of them: no step would change them."
            )
        return added, passed

    @tf.autograph.experimental.do_not_convert
    def full_gradient(self, weights: ModelWeights, batches: Any) -> FullGradient:
        """Return the gradient of a client's mean loss in training.

        Args:
            weights: Weights at which the gradient is computed, as tensors.
            batches: The client's batches, a dataset.

        Raises:
            ValueMismatchError: A layer writes to trainable weights.
        """
        zeros = tuple(widened(tf.zeros_like(weight)) for weight in weights.trainable)

        def add(carried: Any, batch: Any) -> Any:
            sums, non_trainable, totals = carried
            at = ModelWeights(weights.trainable, non_trainable)
            gradients, passed = self.find_gradients(at, batch, totals)
            if passed.writes:
                raise errors.ValueMismatchError(
                    "Expected layers that leave trained weights as they are, found one"
                    " that writes to them in `call`, as SpectralNormalization does,"
                    " which a gradient at fixed weights loses: use an algorithm such as"
                    " fed_avg."
                )
            size = passed.totals.num_examples - totals.num_examples
            added = tuple(
                s if g is None else s + widened(g) * tf.cast(size, s.dtype)
                for s, g in zip(sums, gradients, strict=True)
            )
            return added, passed.weights.non_trainable, passed.totals

        start = (zeros, self.reseed(weights).non_trainable, self.totals.zero())
        sums, non_trainable, totals = batches.reduce(start, add)
        means = tuple(
            tf.cast(
                tf.math.divide_no_nan(s, tf.cast(totals.num_examples, s.dtype)), w.dtype
            )
            for s, w in zip(sums, weights.trainable, strict=True)
        )
        return FullGradient(means, non_trainable, totals)

    @tf.autograph.experimental.do_not_convert
    def evaluate(self, weights: ModelWeights, batches: Any) -> Totals:
        """Return the totals of a client's examples, with layers as in inference.

        Args:
            weights: Weights, as tensors.
            batches: The client's batches, a dataset.
        """
        draws = bool(self._inference_seed_indices)

        def add(carried: Any, batch: Any) -> Any:
            seeded, totals = carried
            at = weights._replace(non_trainable=seeded or weights.non_trainable)
            passed = self._run(at, batch, totals, training=False)
            return passed.weights.non_trainable if draws else (), passed.totals

        # Without draws, the loop carries no seeds, so XLA may compile it.
        seeded = self.reseed(weights, training=False).non_trainable if draws else ()
        return batches.reduce((seeded, self.totals.zero()), add)[1]

    @tf.autograph.experimental.do_not_convert
    def delta(self, before: ModelWeights, after: ModelWeights) -> Delta:
        """Return the change of weights from `before` to `after`, the usual update."""
        pairs = zip(before.trainable, after.trainable, strict=True)
        moved = tuple(b - a for a, b in pairs)
        return Delta(moved, self.statistics_delta(before, after))

    @tf.autograph.experimental.do_not_convert
    def statistics_delta(
        self, before: ModelWeights, after: ModelWeights | FullGradient
    ) -> tuple[Any, ...]:
        """Return the change of the running statistics from `before` to `after`."""
        return tuple(
            _as_float(after.non_trainable[i]) - _as_float(before.non_trainable[i])
            for i in self.statistics_indices
        )

    @tf.autograph.experimental.do_not_convert
    def move(self, weights: ModelWeights, delta: Delta) -> ModelWeights:
        """Return weights plus a delta."""
        expect_delta(delta)
        pairs = zip(weights.trainable, delta.trainable, strict=True)
        moved = tuple(w + d for w, d in pairs)
        return ModelWeights(moved, self.move_statistics(weights, delta))

    @tf.autograph.experimental.do_not_convert
    def move_statistics(self, weights: ModelWeights, delta: Delta) -> tuple[Any, ...]:
        """Return the non-trainable weights plus the changes in `delta.statistics`."""
        non_trainable = list(weights.non_trainable)
        for index, drift in zip(self.statistics_indices, delta.statistics, strict=True):
            before = non_trainable[index]
            if before.dtype.is_floating:
                non_trainable[index] = before + drift
            else:  # a counter is rounded, which is exact for one client
                moved = _as_float(before) + drift
                non_trainable[index] = tf.cast(tf.round(moved), before.dtype)
        return tuple(non_trainable)

    @tf.autograph.experimental.do_not_convert
    def forward(
        self,
        weights: ModelWeights,
        batch: Any,
        totals: Totals,
        *,
        training: bool,
    ) -> ForwardPass:
        """Run the model on a batch, in the function of a client.

        Random layers draw other numbers in each call, for each client and round.

        Args:
            weights: Weights, as tensors.
            batch: Batch of `batch_type`, as tensors.
            totals: Totals of the batches before.
            training: Whether layers such as dropout behave as in training.
        """
        weights = self.reseed(weights, training=training)
        return self._run(weights, batch, totals, training=training)

    def _run(
        self,
        weights: ModelWeights,
        batch: Any,
        totals: Totals,
        *,
        training: bool,
        tape: tf.GradientTape | None = None,
    ) -> ForwardPass:
        # The order of constants in a graph decides the keys of its draws.
        constants = [(v, constant.read()) for v, constant in self._constants]
        mapping = [
            *zip(self.trainable_variables, weights.trainable, strict=True),
            *zip(self._others, weights.non_trainable, strict=True),
            *constants,
        ]
        with keras_seeds.keyed_global_draws(), _Scope(mapping, tape) as scope:
            predictions = self._keras(batch["x"], training=training)
            penalties: list[Any] = self._keras.losses
        predictions = self._by_name(predictions)
        losses: list[Any] = [
            output.measure_loss(batch["y"], predictions) for output in self._outputs
        ]
        # Penalties have the weights' dtype, losses have Keras' `floatx`.
        alike = [tf.cast(penalty, losses[0].dtype) for penalty in penalties]
        loss = sum([*losses[1:], *alike], losses[0])
        totals = self.totals.add(totals, batch["y"], predictions, loss, losses)
        after = ModelWeights(
            tuple(scope.value_of(v) for v in self.trainable_variables),
            tuple(scope.value_of(v) for v in self._others),
        )
        pairs = zip(weights.trainable, after.trainable, strict=True)
        writes = any(given is not now for given, now in pairs)
        return ForwardPass(loss, after, writes, totals)

    def _by_name(self, predictions: Any) -> Any:
        if not isinstance(predictions, list | tuple):
            return predictions
        names = [output.name for output in self._outputs]
        named = dict(zip(names, predictions, strict=True))
        return named.get(None, named)

    @tracebacks.shorten
    def to_keras(self, state: Any) -> keras.Model:
        """Return a new Keras model with the weights of a state, ready to be saved.

        Layers with variables are made again from their configs. Values that `adapt`
        computed are restored.

        Args:
            state: A `ModelWeights`, or an object with the attribute `weights`, such as
                the state of a learning process.

        Raises:
            ValueMismatchError: The weights belong to another model, or a layer of your
                own class cannot be made again from its config.
        """
        weights: Any = getattr(state, "weights", state)
        fits = isinstance(weights, ModelWeights) and [
            np.shape(value) for value in (*weights.trainable, *weights.non_trainable)
        ] == [tuple(v.shape) for v in (*self.trainable_variables, *self._others)]
        if not fits:
            raise errors.ValueMismatchError(
                f"Expected the state of a process of {self}, or its `weights`, found"
                f" {errors.describe(state)}."
            )
        copied, copies = copy_model(self._keras)
        for variable, value in [
            *zip(self.trainable_variables, weights.trainable, strict=True),
            *zip(self._others, weights.non_trainable, strict=True),
            *((v, constant.tensor) for v, constant in self._constants),
        ]:
            copies[id(variable)].assign(value)
        return copied


class _KeyedScope(keras.StatelessScope):
    """A scope whose seeds have keys, so that `keras_seeds` does not add other keys."""

    seeds_are_keyed = True


class _Scope(_KeyedScope):
    """A scope with values for a model's variables, from pairs in `mapping`.

    A written value has no gradient with respect to earlier values, as in eager mode.
    `tape` watches written values, or is None without gradients.
    """

    def __init__(
        self, mapping: Sequence[tuple[Any, Any]], tape: tf.GradientTape | None
    ) -> None:
        super().__init__(state_mapping=mapping, collect_losses=True)
        self._tape = tape
        self.value_of: Callable[[Any], Any] = self.get_current_value

    @override
    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if self._tape is not None and variable.trainable:
            # Gradients of later reads stop here.
            value = tf.stop_gradient(value)
            self._tape.watch(value)
        super().add_update((variable, value))


def expect_model(value: object) -> None:
    """Raise ValueMismatchError unless a value is a `Model` that did not change."""
    if not isinstance(value, Model):
        raise errors.ValueMismatchError(
            f"Expected a `learning.Model` as `model`, found {errors.describe(value)}:"
            " make one of a Keras model, `learning.Model.from_keras(model, loss=...)`."
        )
    value.check_unchanged()


def _as_float(statistic: Any) -> Any:
    """Return a statistic as clients average it. Whole numbers become float32."""
    is_float = statistic.dtype.is_floating
    return statistic if is_float else tf.cast(statistic, tf.float32)


def _check_model(keras_model: keras.Model) -> None:
    expect_object(keras_model, keras.Model, "keras.Sequential([...])")
    is_functional = all(
        getattr(keras_model, f"{k}s", None) for k in ("input", "output")
    )
    if not is_functional and not isinstance(keras_model, keras.Sequential):
        raise errors.ValueMismatchError(
            "Expected a functional Keras model, with inputs and outputs, found"
            f" `{type(keras_model).__name__}`, which has none, as a subclass with its"
            " own `call`: wrap it by `x = keras.Input(shape)` and"
            " `keras.Model(x, model(x))`. For `to_keras`, its `__init__` must pass"
            " `**kwargs` to the `__init__` of `keras.Model`."
        )
    if not keras_model.built:
        raise errors.ValueMismatchError(
            "Expected a Keras model that is built, found one without weights: give it"
            " an Input, or call its `build`."
        )
    for layer in cast("Any", keras_model)._flatten_layers():
        if getattr(layer, "stateful", False):
            raise errors.ValueMismatchError(
                "Expected layers that begin anew with each batch, found"
                f" `{type(layer).__name__}` named `{layer.name}` with `stateful=True`,"
                " whose rows continue the rows of the previous batch: leave that out."
            )
    for name in ("train_step", "test_step", "compute_loss", "compute_metrics"):
        if getattr(type(keras_model), name) is not getattr(keras.Model, name):
            raise errors.ValueMismatchError(
                "Expected a Keras model that trains as `keras.Model` does, found"
                f" `{type(keras_model).__name__}` with a `{name}` of its own, which"
                " clients would not run: put what it adds to the loss into `add_loss`"
                " of a layer, or into `loss`."
            )


def _read_compiled(keras_model: Any) -> tuple[Any, Any]:
    if keras_model.loss is None:
        raise errors.ValueMismatchError(
            "Expected a `loss`, or a Keras model that is compiled with one, found"
            " neither: pass the loss, or call `compile`."
        )
    loss, metrics = keras_model._compile_loss, keras_model._compile_metrics
    has_weights = loss._user_loss_weights is not None
    if has_weights or getattr(metrics, "_user_weighted_metrics", None):
        raise errors.ValueMismatchError(
            "Expected a Keras model that is compiled without `loss_weights` and"
            " `weighted_metrics`, found one with them: scale the losses themselves, and"
            " pass `loss` and `metrics`."
        )
    return keras_model.loss, getattr(metrics, "_user_metrics", None)


def _named(keras_model: Any, kind: str) -> dict[Any, Any]:
    """Return a model's symbolic inputs or outputs by name. A single one has None."""
    tensors = getattr(keras_model, f"{kind}s")
    structure = getattr(keras_model, kind, None)
    if isinstance(structure, Mapping):
        named = dict(structure)
    elif len(tensors) == 1:
        named = {None: tensors[0]}
    else:
        is_input = kind == "input"
        names = [t.name for t in tensors] if is_input else keras_model.output_names
        named = dict(zip(names, tensors, strict=True))
    # Keras accepts batches of another size than the model was built with.
    return {
        name: keras.KerasTensor((None, *tensor.shape[1:]), tensor.dtype)
        for name, tensor in named.items()
    }


def _is_unchanged(variable: Any, constant: Constant) -> bool:
    now, before = (
        tensor._numpy() for tensor in (tf.convert_to_tensor(variable), constant.tensor)
    )
    return np.may_share_memory(now, before) or np.array_equal(now, before)


def _struct_of(types: Mapping[Any, fl.TensorType]) -> fl.Type:
    if None in types:
        return types[None]
    return fl.StructWithPythonType(list(types.items()), dict)


def _types_of(variables: Sequence[Any]) -> tuple[fl.TensorType, ...]:
    return tuple(_tensor_type(v.dtype, tuple(v.shape)) for v in variables)


def _tensor_type(dtype: str, shape: Sequence[int | None]) -> fl.TensorType:
    numpy_dtype = np.str_ if dtype == "string" else tf.as_dtype(dtype).as_numpy_dtype
    return fl.TensorType(numpy_dtype, list(shape))
