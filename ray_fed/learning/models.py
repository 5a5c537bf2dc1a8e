"""A Keras 3 model as pure functions of its weights: what clients train and evaluate.

The Keras model that a user hands in is read and never written: its layers run in a
`keras.StatelessScope`, on weights that come from the server and go back to it.

A variable that is neither trained nor changed by a batch, such as a weight of a frozen
layer or a kernel beside its LoRA adapters, is the same in every round, so neither the
server's state nor a client's update holds it. It is a constant of the graphs that use
it, which reach a worker once.

Copies of Keras models, with what their layers learnt, not their configs alone.

What random layers draw from: seeds of one client in one call.

Keras keeps a seed and a count in each random layer (`SeedGenerator`), and counts each
draw, so steps and epochs differ once clients do:

    at the server           [seed, 0]                  as the layer was made
    at a client             [seed, 0] + key            before its first batch
    after n draws           [seed, 0] + key + [0, n]   by Keras

The key is a random number like all others of ray_fed: of the run's seed, the call (and
so the round), the client, and the place in the computation. Layers of one seed draw the
same, as they do in Keras.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state  # no public name
from keras.src.random import seed_generator  # no public name
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

# pyright: reportPrivateUsage=false


def copy_model(model: keras.Model) -> tuple[keras.Model, dict[int, Any]]:
    """Return a copy of a functional model, and its variables by those copied.

    Layers with variables are made again from their configs, then what they save is
    loaded; the others are the same objects in all but their place in the model.

    Returns:
        The copy, and its variables by the `id` of the model's.

    Raises:
        ValueMismatchError: a layer cannot be made from its config; it is named.
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
    """Return a second object of a layer without variables, for a second model."""
    twin = object.__new__(type(layer))
    vars(twin).update(vars(layer))
    vars(twin).update(_inbound_nodes=[], _outbound_nodes=[])
    return twin


def _remake(layer: Any) -> Any:
    """Return an unbuilt layer with the config of another."""
    # Functions and classes of the user's are at hand: they need not be registered.
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
    """Give a layer, and those in it, what another has learnt."""
    for original, remade in zip(
        layer._flatten_layers(), copied._flatten_layers(), strict=True
    ):
        # The config of a layer of layers does not say what was done to these.
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
    """Raise unless a layer of a user's class has the numbers and texts of another."""
    for name, value in vars(original).items():
        if name.startswith("_") or name in ("name", "built"):
            continue
        if isinstance(value, bool | int | float | str) or value is None:
            now = getattr(remade, name, None)
            if now != value:
                raise _lost(original, f"`{name}` of `{now}`, not `{value}`")


def _lost(layer: Any, found: str) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        "Expected a layer that is made again from its config, found"
        f" `{type(layer).__name__}` named `{layer.name}`: that gave {found}. Have its"
        " `get_config` return all arguments of its `__init__`; or set the weights of"
        " your own model: `for v, value in zip(keras_model.trainable_variables,"
        " state.weights.trainable): v.assign(value)`."
    )


def reseed(seed_indices: Sequence[int], non_trainable: Sequence[Any]) -> Any:
    """Return weights that are not trained, with seeds for a client's next pass.

    Call it in a client's graph: each call draws another key.

    Args:
        seed_indices: of a `Model`.
        non_trainable: as in `ModelWeights`; from the server.
    """
    seeded = list(non_trainable)
    if seed_indices:
        key = _draw()
        for index in seed_indices:
            seeded[index] += tf.cast(key, seeded[index].dtype)
    return tuple(seeded)


def _draw() -> tf.Tensor:
    return tf.raw_ops.NonDeterministicInts(shape=[2], dtype=tf.int64)


class _GraphSeeds:
    """Stands for a `SeedGenerator`, without a variable."""

    def next(self, ordered: bool = True) -> tf.Tensor:  # noqa: ARG002, FBT001, FBT002
        return _draw()


@contextlib.contextmanager
def keyed_global_seeds() -> Generator[None]:
    """Let layers that draw without a seed draw keyed numbers in the current graph.

    Keras' own global generator is a variable, which belongs to no model and so to no
    graph of ray_fed.
    """
    name = seed_generator.GLOBAL_SEED_GENERATOR
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, _GraphSeeds())
    try:
        yield
    finally:
        global_state.set_global_attribute(name, before)


_SEED_NAME = "seed_generator_state"
"""What Keras names the variable that a random layer draws from."""

_MAX_CONSTANT_BYTES = 2**30
"""A graph, with all else in it, may have twice as many: a limit of protobuf."""


class ModelWeights(NamedTuple):
    """The variables of a model, in the order of the Keras model.

    Attributes:
        trainable: of `keras_model.trainable_variables`.
        non_trainable: of `keras_model.non_trainable_variables`, such as the running
            statistics of a batch normalisation; also the seeds of random layers. Those
            that no batch changes are no part of it: see `from_keras`.
    """

    trainable: tuple[Any, ...]
    non_trainable: tuple[Any, ...]

    @override
    def __repr__(self) -> str:
        counts = f"{len(self.trainable)} trainable, {len(self.non_trainable)} other"
        return f"<weights: {counts} variables>"


class Delta(NamedTuple):
    """How far weights moved: the client's minus the server's.

    Attributes:
        trainable: as in `ModelWeights`.
        statistics: the non-trainable weights at `Model.statistics_indices`, whole
            numbers as float32.
    """

    trainable: tuple[Any, ...]
    statistics: tuple[Any, ...]


def expect_delta(value: object) -> None:
    """Raise ValueMismatchError unless a value is built as a delta is."""
    if not (hasattr(value, "trainable") and hasattr(value, "statistics")):
        is_weights = isinstance(value, ModelWeights)
        raise errors.ValueMismatchError(
            "Expected how far weights moved, a `Delta`, found"
            f" {'weights' if is_weights else errors.describe(value)}: have the function"
            " of a client return `model.delta(server.weights, weights)` first, and an"
            " aggregator a value that is built as this."
        )


class FullGradient(NamedTuple):
    """What a pass over a client's data comes to.

    Attributes:
        trainable: the gradient of the mean loss, of the weights' types; zeros over no
            example.
        non_trainable: weights after the pass, as layers leave them in training.
        totals: of all examples.
    """

    trainable: tuple[Any, ...]
    non_trainable: tuple[Any, ...]
    totals: Totals


class ForwardPass(NamedTuple):
    """What a model makes of one batch.

    Attributes:
        loss: f32[], mean over the batch, with the penalties of its layers.
        weights: after the batch; of the trainable ones, those that a layer wrote to in
            its `call`, as `keras.layers.SpectralNormalization` does, are others.
        writes: whether there are any such.
        totals: those given, with the batch added.
    """

    loss: Any
    weights: ModelWeights
    writes: bool
    totals: Totals


class Model:
    """A functional Keras model with the loss and the metrics to train it by.

    Build it with `from_keras`.

    Attributes:
        weights_type: of its `ModelWeights`.
        batch_type: of one batch, `<x=f32[?, ...], y=i32[?]>` for a classifier.
        data_type: of all clients' data, `{<x=..., y=...>*}@CLIENTS`.
        totals: counts what `loss` and metrics need.
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
        # Tensors: a graph that uses one has it as a constant, once.
        self._constants = [
            (v, tf.constant(v.numpy())) for v in others if id(v) in constant
        ]
        _check_size(self._constants)
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
        """Return its name and the number of its parameters, as text."""
        count = self._keras.count_params()
        return f"`{self._keras.name}` of {count:,} parameters"

    @classmethod
    @tracebacks.shorten
    def from_keras(
        cls,
        keras_model: keras.Model,
        *,
        loss: Loss | Mapping[str, Loss],
        metrics: Metrics | Mapping[str, Metrics] = (),
        label_type: fl.TensorType | Mapping[str, fl.TensorType] | None = None,
    ) -> "Model":
        """Return a model that trains copies of a Keras model's weights.

        Variables that are neither trained nor changed by a batch in training, such as
        weights of layers with `trainable = False`, or kernels under `enable_lora`, are
        taken as they are now. They are constants of graphs: no part of the state or of
        updates, sent to each worker once and not in each round.

        Args:
            keras_model: built and functional; left as it is. Call `ray_fed.init`
                before you build it: TensorFlow's threads are fixed by the first thing
                that it computes. Several inputs or outputs have names: the keys of
                their dictionary, or those of their layers.
            loss: as Keras' `compile` takes it, an object, a name ("mse") or a function;
                one number a batch; for several outputs a dictionary, whose losses are
                summed.
            metrics: to report, as `compile` takes them: objects, names ("accuracy") or
                functions; those whose variables are sums over examples, such as
                accuracies, means, confusion counts; for several outputs a dictionary of
                lists. Objects are used as they are, and keep their values.
            label_type: of the labels of a batch, its first dimension unknown; for
                several outputs a dictionary. By default that of the output, but
                `int32[?]`, a class for each example, for a sparse loss, and for objects
                of a binary loss or of a class of one's own.

        Raises:
            ValueMismatchError: the loss or a metric is none of Keras, a metric is not a
                sum, there is not one loss for each output, or the constants have more
                than 1 GiB.
        """
        _check_model(keras_model)
        symbolic = _named(keras_model, "output")
        return cls(keras_model, build_outputs(symbolic, loss, metrics, label_type))

    def initial_weights(self) -> ModelWeights:
        """Return the Keras model's weights of now, as numpy arrays."""
        return ModelWeights(
            tuple(v.numpy() for v in self.trainable_variables),
            tuple(v.numpy() for v in self._others),
        )

    def check_unchanged(self) -> None:
        """Raise if constants of the graph are no longer those of the Keras model.

        Raises:
            ValueMismatchError: constants, or which weights are trained, changed since
                `from_keras`.
        """
        before, now = self.trainable_variables, self._keras.trainable_variables
        if [id(v) for v in before] != [id(v) for v in now]:
            changed = "which weights are trained"
        elif any(np.any(v.numpy() != value.numpy()) for v, value in self._constants):
            changed = "weights that are not trained"
        else:
            return
        raise errors.ValueMismatchError(
            "Expected the Keras model as `Model.from_keras` read it, found a change of"
            f" {changed}: call `from_keras` after it, say after weights are loaded."
        )

    @property
    def seed_indices(self) -> tuple[int, ...]:
        """The positions among the non-trainable weights of random layers' seeds."""
        return tuple(i for i, v in enumerate(self._others) if v.name == _SEED_NAME)

    @property
    def statistics_indices(self) -> tuple[int, ...]:
        """The positions of the running statistics: what clients average untrained.

        The non-trainable weights that a batch in training changes, but for seeds.
        """
        return tuple(i for i, v in enumerate(self._others) if v.name != _SEED_NAME)

    @functools.cached_property
    def inference_seed_indices(self) -> tuple[int, ...]:
        """Those of `seed_indices` that layers draw from outside of training, too."""
        seeds = [(i, self._others[i]) for i in self.seed_indices]
        written = self._find_written([v for _, v in seeds], training=False)
        return tuple(i for i, v in seeds if id(v) in written)

    def _find_written(self, variables: Sequence[Any], *, training: bool) -> set[int]:
        """Return the `id`s of those of the variables that a batch changes."""
        written: set[int] = set()

        def run(inputs: Any) -> None:
            with keyed_global_seeds(), keras.StatelessScope() as scope:
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
        """Return gradients of the loss in training, and the forward pass to it.

        Args:
            weights: tensors.
            batch: tensors, of `batch_type`.
            totals: of the batches before.
            scale_loss: what is differentiated of a loss.

        Returns:
            One gradient for each trainable weight, as the loss finds them: behind what
            a layer wrote to them. None where the loss does not depend on a weight.

        Raises:
            ValueMismatchError: the loss depends on no weight.
        """
        with tf.GradientTape() as tape:
            tape.watch(weights.trainable)
            passed = self.forward(weights, batch, totals, training=True, tape=tape)
            loss = scale_loss(passed.loss)
        after, before = passed.weights.trainable, weights.trainable
        # In one call: a persistent tape would leave no kernels to recurrent layers.
        sources = [*after, *before] if passed.writes else list(after)
        added: list[Any] = tape.gradient(loss, sources)
        added, then = added[: len(after)], added[len(after) :]
        for i, gradient in enumerate(then):  # what was read before a write counts, too
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
        """Return the gradient of a client's mean loss, at some weights, in training.

        Args:
            weights: where; tensors.
            batches: of the client, a dataset.
        """
        zeros = tuple(widened(tf.zeros_like(weight)) for weight in weights.trainable)

        def add(carried: Any, batch: Any) -> Any:
            sums, non_trainable, totals = carried
            at = ModelWeights(weights.trainable, non_trainable)
            gradients, passed = self.differentiate(at, batch, totals)
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

        seeded = reseed(self.seed_indices, weights.non_trainable)
        start = (zeros, seeded, self.totals.zero())
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
        """Return the totals of a client's examples, as in evaluation.

        Args:
            weights: tensors.
            batches: of the client, a dataset.
        """
        seeds = self.inference_seed_indices

        def add(carried: Any, batch: Any) -> Any:
            seeded, totals = carried
            at = weights._replace(non_trainable=seeded or weights.non_trainable)
            passed = self.forward(at, batch, totals, training=False)
            return passed.weights.non_trainable if seeds else (), passed.totals

        # Without a draw, XLA may compile it.
        seeded = reseed(seeds, weights.non_trainable) if seeds else ()
        return batches.reduce((seeded, self.totals.zero()), add)[1]

    @tf.autograph.experimental.do_not_convert
    def delta(self, before: ModelWeights, after: ModelWeights) -> Delta:
        """Return how far weights moved: what most clients send."""
        pairs = zip(before.trainable, after.trainable, strict=True)
        moved = tuple(b - a for a, b in pairs)
        return Delta(moved, self.statistics_delta(before, after))

    @tf.autograph.experimental.do_not_convert
    def statistics_delta(
        self, before: ModelWeights, after: ModelWeights | FullGradient
    ) -> tuple[Any, ...]:
        """Return how far running statistics moved."""
        return tuple(
            _as_float(after.non_trainable[i]) - _as_float(before.non_trainable[i])
            for i in self.statistics_indices
        )

    @tf.autograph.experimental.do_not_convert
    def move(self, weights: ModelWeights, delta: Delta) -> ModelWeights:
        """Return weights moved by a delta."""
        expect_delta(delta)
        pairs = zip(weights.trainable, delta.trainable, strict=True)
        moved = tuple(w + d for w, d in pairs)
        return ModelWeights(moved, self.move_statistics(weights, delta))

    @tf.autograph.experimental.do_not_convert
    def move_statistics(self, weights: ModelWeights, delta: Delta) -> tuple[Any, ...]:
        """Return the weights that are not trained, moved as averages say."""
        non_trainable = list(weights.non_trainable)
        for index, drift in zip(self.statistics_indices, delta.statistics, strict=True):
            before = non_trainable[index]
            if before.dtype.is_floating:
                non_trainable[index] = before + drift
            else:  # counters: the nearest whole number, which one client has exactly
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
        tape: tf.GradientTape | None = None,
    ) -> ForwardPass:
        """Run the model on a batch, inside of a graph that is being traced.

        Args:
            weights: tensors.
            batch: tensors, of `batch_type`.
            totals: of the batches before.
            training: whether layers such as dropout behave as in training.
            tape: that is to watch what layers write to their weights.
        """
        # The order of constants in a graph has a part in the keys of its draws.
        constants = [(v, tf.convert_to_tensor(value)) for v, value in self._constants]
        mapping = [
            *zip(self.trainable_variables, weights.trainable, strict=True),
            *zip(self._others, weights.non_trainable, strict=True),
            *constants,
        ]
        with keyed_global_seeds(), _Scope(mapping, tape) as scope:
            predictions = self._keras(batch["x"], training=training)
            penalties: list[Any] = self._keras.losses
        predictions = self._by_name(predictions)
        losses: list[Any] = [
            output.measure_loss(batch["y"], predictions) for output in self._outputs
        ]
        # Penalties are of the weights' type, losses of Keras' `floatx`.
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

        Layers are made again from their configs, but for those without variables, and
        what `adapt` computed is put back.

        Args:
            state: a `ModelWeights`, or what has one as `weights`, such as the state
                of a learning process.

        Raises:
            ValueMismatchError: they are weights of another model, or a layer of one's
                own cannot be made again from its config.
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
            *self._constants,
        ]:
            copies[id(variable)].assign(value)
        return copied


class _Scope(keras.StatelessScope):
    """A scope of `Model`'s variables, in which a write cuts gradients as in eager mode.

    Args:
        mapping: a value for each variable.
        tape: that the values written are to be watched by; None: there are no
            gradients.
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
            # What is read of a variable does not depend on how that was computed.
            value = tf.stop_gradient(value)
            self._tape.watch(value)
        super().add_update((variable, value))


def expect_model(value: object) -> None:
    """Raise unless a value is a `Model`, and what it was made of is as it was.

    Raises:
        ValueMismatchError: it is something else, such as a model of Keras; or as
            `Model.check_unchanged` says.
    """
    if not isinstance(value, Model):
        raise errors.ValueMismatchError(
            f"Expected a `learning.Model` as `model`, found {errors.describe(value)}:"
            " make one of a Keras model, `learning.Model.from_keras(model, loss=...)`."
        )
    value.check_unchanged()


def _as_float(statistic: Any) -> Any:
    """Return a statistic as it is averaged: whole numbers as float32."""
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
            " own `call`: make one of it by `x = keras.Input(shape)` and"
            " `keras.Model(x, model(x))`; `to_keras` needs its `__init__` to take"
            " `**kwargs` for that of `keras.Model`."
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
                " whose rows go on from those of the batch before: leave that out."
            )
    for name in ("train_step", "test_step", "compute_loss", "compute_metrics"):
        if getattr(type(keras_model), name) is not getattr(keras.Model, name):
            raise errors.ValueMismatchError(
                "Expected a Keras model that trains as `keras.Model` does, found"
                f" `{type(keras_model).__name__}` with a `{name}` of its own, which"
                " clients would not run: put what it adds to the loss into `add_loss`"
                " of a layer, or into `loss`."
            )


def _named(keras_model: Any, kind: str) -> dict[Any, Any]:
    """Return a model's symbolic inputs or outputs by name; None for the only one."""
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
    # Keras, too, lets a model take other batches than that which it was built with.
    return {
        name: keras.KerasTensor((None, *tensor.shape[1:]), tensor.dtype)
        for name, tensor in named.items()
    }


def _check_size(constants: Sequence[tuple[Any, tf.Tensor]]) -> None:
    num_bytes = sum(value.numpy().nbytes for _, value in constants)
    if num_bytes > _MAX_CONSTANT_BYTES:
        raise errors.ValueMismatchError(
            f"Expected weights that are not trained of up to {_MAX_CONSTANT_BYTES}"
            f" bytes, found {num_bytes} bytes: store them with fewer bits, or train on"
            " what the base makes of the data."
        )


def _struct_of(types: Mapping[Any, fl.TensorType]) -> fl.Type:
    if None in types:
        return types[None]
    return fl.StructWithPythonType(list(types.items()), dict)


def _types_of(variables: Sequence[Any]) -> tuple[fl.TensorType, ...]:
    return tuple(_tensor_type(v.dtype, tuple(v.shape)) for v in variables)


def _tensor_type(dtype: str, shape: Sequence[int | None]) -> fl.TensorType:
    numpy_dtype = np.str_ if dtype == "string" else tf.as_dtype(dtype).as_numpy_dtype
    return fl.TensorType(numpy_dtype, list(shape))
