"""A Keras 3 model as pure functions of its weights: what clients train and evaluate.

The Keras model that a user hands in is read and never written: its layers run by
`stateless_call`, on weights that come from the server and go back to it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import federated_language as fl
import keras
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.learning.checks import expect_object
from ray_fed.learning.frozen_weights import SEED_NAME, FrozenWeights
from ray_fed.learning.layer_seeds import keyed_global_seeds
from ray_fed.learning.objectives import Loss, Metrics, Output, build_outputs
from ray_fed.learning.totals import Totals, TotalsKeeper
from ray_fed.observability import reprs


class ModelWeights(NamedTuple):
    """The variables of a model, in the order of the Keras model.

    Attributes:
        trainable: of `keras_model.trainable_variables`.
        non_trainable: of `keras_model.non_trainable_variables`, such as the running
            statistics of a batch normalisation; also the seeds of random layers. Those
            of layers with `trainable = False` are no part of it: see `from_keras`.
    """

    trainable: tuple[Any, ...]
    non_trainable: tuple[Any, ...]

    @override
    def __repr__(self) -> str:
        counts = f"{len(self.trainable)} trainable, {len(self.non_trainable)} other"
        return f"<weights: {counts} variables>"


class ForwardPass(NamedTuple):
    """What a model makes of one batch.

    Attributes:
        loss: f32[], mean over the batch, with the penalties of its layers.
        non_trainable: after the batch, as in `ModelWeights`.
        totals: those given, with the batch added.
    """

    loss: Any
    non_trainable: tuple[Any, ...]
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
        self._frozen = FrozenWeights(keras_model)
        inputs = {
            name: _tensor_type(tensor.dtype, tensor.shape)
            for name, tensor in _named(keras_model, "input").items()
        }
        labels = {output.name: output.label_type for output in outputs}
        self.batch_type = fl.StructWithPythonType(
            [("x", _struct_of(inputs)), ("y", _struct_of(labels))], dict
        )
        self.data_type = fl.FederatedType(fl.SequenceType(self.batch_type), fl.CLIENTS)
        self.weights_type = fl.to_type(
            ModelWeights(
                _types_of(keras_model.trainable_variables),
                _types_of(self._others),
            )
        )
        self.totals = TotalsKeeper.of(outputs)

    @override
    def __repr__(self) -> str:
        count = self._keras.count_params()
        taken = reprs.shorten(str(self.batch_type))
        return f"<model `{self._keras.name}`: {count} parameters, batches {taken}>"

    @classmethod
    def from_keras(
        cls,
        keras_model: keras.Model,
        *,
        loss: Loss | Mapping[str, Loss],
        metrics: Metrics | Mapping[str, Metrics] = (),
        label_type: fl.TensorType | Mapping[str, fl.TensorType] | None = None,
    ) -> "Model":
        """Return a model that trains copies of a Keras model's weights.

        The weights of layers with `trainable = False`, such as a pretrained base, are
        taken as they are now. They are constants of graphs: no part of the state or of
        updates, sent to each worker once and not in each round.

        Args:
            keras_model: built and functional; left as it is. Call `ray_fed.init`
                before you build it: TensorFlow's threads are fixed by the first thing
                that it computes. Several inputs or outputs have names: the keys of
                their dictionary, or those of their layers.
            loss: mean over a batch, an object or a name of Keras ("mse"); for several
                outputs a dictionary, whose losses are summed.
            metrics: to report, objects or names of Keras ("accuracy"); those whose
                variables are sums over examples, such as accuracies, means, confusion
                counts; for several outputs a dictionary of lists.
            label_type: of the labels of a batch, its first dimension unknown; for
                several outputs a dictionary. By default that of the output for a loss
                by name, unless it is a sparse one, and else `int32[?]`, a class for
                each example.

        Raises:
            ValueMismatchError: the loss or a metric is none of Keras, a metric is not a
                sum, there is not one loss for each output, or the layers that are not
                trained have more than 1 GiB.
        """
        _check_model(keras_model)
        symbolic = _named(keras_model, "output")
        return cls(keras_model, build_outputs(symbolic, loss, metrics, label_type))

    def initial_weights(self) -> ModelWeights:
        """Return the Keras model's weights of now, as numpy arrays."""
        return ModelWeights(
            tuple(v.numpy() for v in self._keras.trainable_variables),
            tuple(v.numpy() for v in self._others),
        )

    @property
    def _others(self) -> list[Any]:
        """The non-trainable variables, but for the frozen ones."""
        return self._frozen.others(self._keras.non_trainable_variables)

    @property
    def constraints(self) -> tuple[Any, ...]:
        """Of the trainable weights, in order; None where one has no constraint."""
        return tuple(v.constraint for v in self._keras.trainable_variables)

    @property
    def seed_indices(self) -> tuple[int, ...]:
        """The positions among the non-trainable weights of random layers' seeds."""
        return tuple(i for i, v in enumerate(self._others) if v.name == SEED_NAME)

    @functools.cached_property
    def statistics_indices(self) -> tuple[int, ...]:
        """The positions of the running statistics: what clients average untrained.

        Floats among the non-trainable weights that a batch in training changes.
        """
        is_float = keras.backend.is_float_dtype
        floats = [i for i, v in enumerate(self._others) if is_float(v.dtype)]
        return self._find_written(floats, training=True)

    @functools.cached_property
    def inference_seed_indices(self) -> tuple[int, ...]:
        """Those of `seed_indices` that layers draw from outside of training, too."""
        return self._find_written(self.seed_indices, training=False)

    def _find_written(
        self, indices: Sequence[int], *, training: bool
    ) -> tuple[int, ...]:
        written: list[int] = []

        def run(weights: ModelWeights, batch: Any) -> Any:
            zero = self.totals.zero()
            passed = self.forward(weights, batch, zero, training=training)
            before, after = weights.non_trainable, passed.non_trainable
            written.extend(i for i in indices if after[i] is not before[i])
            return passed.totals

        if indices:
            rtf.computation(run, (self.weights_type, self.batch_type))
        return tuple(written)

    @tf.autograph.experimental.do_not_convert
    def forward(
        self, weights: ModelWeights, batch: Any, totals: Totals, *, training: bool
    ) -> ForwardPass:
        """Run the model on a batch, inside of a graph that is being traced.

        Args:
            weights: tensors.
            batch: tensors, of `batch_type`.
            totals: of the batches before.
            training: whether layers such as dropout behave as in training.

        Raises:
            ValueMismatchError: a layer writes to weights that are not trained.
        """
        given = self._frozen.fill_traced(weights.non_trainable)
        call: Any = self._keras.stateless_call
        with keyed_global_seeds():
            predictions, non_trainable, penalties = call(
                list(weights.trainable),
                given,
                batch["x"],
                training=training,
                return_losses=True,
            )
        self._frozen.check_kept(given, non_trainable)
        predictions = self._by_name(predictions)
        losses: list[Any] = [
            output.loss(output.of(batch["y"]), output.of(predictions))
            for output in self._outputs
        ]
        # Penalties are of the weights' type, losses of Keras' `floatx`.
        alike = [tf.cast(penalty, losses[0].dtype) for penalty in penalties]
        loss = sum([*losses[1:], *alike], losses[0])
        totals = self.totals.add(totals, batch["y"], predictions, loss)
        return ForwardPass(loss, tuple(self._frozen.others(non_trainable)), totals)

    def _by_name(self, predictions: Any) -> Any:
        if not isinstance(predictions, list | tuple):
            return predictions
        names = [output.name for output in self._outputs]
        named = dict(zip(names, predictions, strict=True))
        return named.get(None, named)

    def to_keras(self, state: Any) -> keras.Model:
        """Return a new Keras model with the weights of a state, ready to be saved.

        Args:
            state: a `ModelWeights`, or what has one as `weights`, such as the state
                of a learning process.
        """
        weights: ModelWeights = getattr(state, "weights", state)
        copy = keras.models.clone_model(self._keras)
        non_trainable = self._frozen.fill(weights.non_trainable)
        for variable, value in zip(
            [*copy.trainable_variables, *copy.non_trainable_variables],
            [*weights.trainable, *non_trainable],
            strict=True,
        ):
            variable.assign(value)
        return copy


def expect_model(value: object) -> None:
    """Raise unless a value is a `Model`.

    Raises:
        ValueMismatchError: it is something else, such as a model of Keras.
    """
    if not isinstance(value, Model):
        raise errors.ValueMismatchError(
            f"Expected a `learning.Model` as `model`, found {errors.describe(value)}:"
            " make one of a Keras model, `learning.Model.from_keras(model, loss=...)`."
        )


def _check_model(keras_model: keras.Model) -> None:
    expect_object(keras_model, keras.Model, "keras.Sequential([...])")
    if not keras_model.built:
        raise errors.ValueMismatchError(
            "Expected a Keras model that is built, found one without weights: give it"
            " an Input, or call its `build`."
        )
    for kind in ("input", "output"):
        # A subclass of keras.Model that is not functional has neither.
        if not getattr(keras_model, f"{kind}s", None):
            raise errors.ValueMismatchError(
                f"Expected a functional Keras model with an {kind}, found none."
            )


def _named(keras_model: Any, kind: str) -> dict[Any, Any]:
    """Return a model's symbolic inputs or outputs by name; None for the only one.

    Args:
        keras_model: a functional one.
        kind: "input" or "output".
    """
    tensors = getattr(keras_model, f"{kind}s")
    if isinstance(keras_model, keras.Sequential):
        return {None: tensors[0]}
    structure = getattr(keras_model, kind)
    if isinstance(structure, Mapping):
        return dict(structure)
    if len(tensors) == 1:
        return {None: tensors[0]}
    names = (
        keras_model.output_names
        if kind == "output"
        else [tensor.name for tensor in tensors]
    )
    return dict(zip(names, tensors, strict=True))


def _struct_of(types: Mapping[Any, fl.TensorType]) -> fl.Type:
    if None in types:
        return types[None]
    return fl.StructWithPythonType(list(types.items()), dict)


def _types_of(variables: Sequence[Any]) -> tuple[fl.TensorType, ...]:
    return tuple(_tensor_type(v.dtype, tuple(v.shape)) for v in variables)


def _tensor_type(dtype: str, shape: Sequence[int | None]) -> fl.TensorType:
    return fl.TensorType(tf.as_dtype(dtype).as_numpy_dtype, list(shape))
