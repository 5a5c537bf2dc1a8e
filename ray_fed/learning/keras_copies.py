"""Copies of Keras models, with what their layers learnt, not their configs alone."""

# pyright: reportPrivateUsage=false

from typing import Any

import keras

import ray_fed.errors as errors


def copy_model(model: keras.Model) -> tuple[keras.Model, dict[int, Any]]:
    """Return a copy of a functional model, and its variables by those copied.

    Layers with variables are made again from their configs, then what they save is
    loaded; the others are the same objects in all but their place in the model.

    Args:
        model: built; left as it is.

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
