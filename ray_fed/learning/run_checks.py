"""Arguments of `learning.run` of another kind than it takes: told before any round."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.observability import reprs


def _is_function(value: object) -> bool:
    return value is None or callable(value)


def _is_sequence(value: object) -> bool:
    has_places = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return has_places and not isinstance(value, Mapping)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "data": (_is_sequence, "a sequence with the batches of each client, no mapping,"),
    "storage_path": (
        lambda value: value is None or isinstance(value, str | os.PathLike),
        "a path, a URI or None",
    ),
    "evaluate": (_is_function, "a function of the state or None"),
    "callbacks": (
        lambda value: isinstance(value, Sequence) and not isinstance(value, str),
        "a list of callbacks, such as `[callback]`,",
    ),
    "on_error": (lambda value: value in ("raise", "log"), '"raise" or "log"'),
    "stop": (_is_function, "a function of the history or None"),
    "progress": (lambda value: isinstance(value, bool), "True or False"),
}


def check_kinds(arguments: Mapping[str, object]) -> None:
    """Raise unless arguments are of their kinds.

    Args:
        arguments: by name; those of `_KINDS` alone.

    Raises:
        ConfigError: one is of another kind.
    """
    for name, value in arguments.items():
        is_right, kind = _KINDS[name]
        if not is_right(value):
            raise errors.ConfigError(
                f"Expected {kind} as `{name}`, found {errors.describe(value)}."
            )


def check_process(process: Any) -> None:
    """Raise unless a process trains: its `next` returns a state first.

    Raises:
        ConfigError: it is no process, or an evaluation.
    """
    if not hasattr(process, "initialize") or not hasattr(process, "next"):
        raise errors.ConfigError(
            "Expected a learning process, such as `build_fed_avg` returns, as"
            f" `process`, found {errors.describe(process)}."
        )
    if not isinstance(process.next, fl.framework.Computation):
        return
    signature = process.next.type_signature
    state = process.initialize.type_signature.result
    result = signature.result
    returned = result[0] if isinstance(result, fl.StructType) and result else None
    if returned is None or not state.is_assignable_from(returned):
        raise errors.ConfigError(
            "Expected a learning process whose `next` returns the new state first, a"
            f" `{reprs.shorten(str(state))}`, as `process`, found one that returns"
            f" `{reprs.shorten(str(result))}`: an evaluation is called in a function"
            " that is passed as `evaluate`."
        )
