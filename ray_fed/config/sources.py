"""Where settings come from: a YAML file, variables, and errors that name them."""

import difflib
import os
from collections.abc import Mapping
from typing import Any, cast

import pydantic
import yaml

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.config.fields import expand_counts
from ray_fed.files import opening

_PREFIX = "RAY_FED_"
_MAX_YAML_BYTES = 2**18
_NO_YAML = (OSError, yaml.YAMLError, ValueError, TypeError, RecursionError)
"""What is raised for text that is no YAML: no UTF-8, no such date, too deep."""


def variables_of(error: object, arguments: Mapping[str, Any]) -> list[str]:
    """Return the variables that hold settings which an error is about."""
    details = error.errors() if isinstance(error, pydantic.ValidationError) else []
    paths = [[str(part) for part in detail["loc"]] for detail in details]
    paths = [path for path in paths if not _holds(arguments, path)]
    return [
        variable
        for variable, text in sorted(os.environ.items())
        if variable.startswith(_PREFIX)
        and any(_holds(read_environment({variable: text}), path) for path in paths)
    ]


def _holds(settings: Any, path: list[str]) -> bool:
    """Return whether settings decide the one at a path, alone or with others."""
    for part in path:
        if not isinstance(settings, Mapping):
            return True
        named = {str(k): v for k, v in cast("Mapping[Any, Any]", settings).items()}
        if part not in named:
            return False
        settings = named[part]
    return True


def read_file(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Read settings from a YAML file; without a path there are none.

    Raises:
        ConfigError: the file is missing, too long, no YAML, or holds no mapping.
    """
    if path is None:
        return {}
    try:
        with opening.open_regular(path) as file:
            text = file.read(_MAX_YAML_BYTES + 1)
        if len(text) > _MAX_YAML_BYTES:
            raise ValueError(f"more than {_MAX_YAML_BYTES} bytes")
        loaded = cast("object", yaml.safe_load(text.decode("utf-8")))
    except _NO_YAML as error:
        raise errors.ConfigError(
            f"Expected a YAML file at `{path}`, found: {error}"
        ) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise errors.ConfigError(
            f"Expected `{path}` to hold a mapping of settings, found a"
            f" {type(loaded).__name__}."
        )
    return cast("dict[str, Any]", loaded)


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read settings from `RAY_FED_...` variables.

    Raises:
        ConfigError: the value of a variable is no YAML.
    """
    settings: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(_PREFIX) or variable == tracebacks.VARIABLE:
            continue
        try:
            value: Any = yaml.safe_load(text)
        except _NO_YAML as error:
            raise errors.ConfigError(
                f"Expected YAML in the variable `{variable}`, found"
                f" `{errors.describe(text)}`."
            ) from error
        for name in reversed(variable.removeprefix(_PREFIX).lower().split("__")):
            value = {name: value}
        settings = merge(settings, expand_counts(value))
    return settings


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of two sources; where both have one, `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, Mapping):
            merged[key] = merge(cast("dict[str, Any]", under), cast("Any", value))
        else:
            merged[key] = value
    return merged


def explain(error: pydantic.ValidationError, model: type[pydantic.BaseModel]) -> str:
    """Return an error's text: each setting that is wrong, and what is legal there."""
    return " ".join(
        __explain_one(cast("Any", detail), model) for detail in error.errors()
    )


def __explain_one(detail: dict[str, Any], model: type[pydantic.BaseModel]) -> str:
    path = [str(part) for part in detail["loc"]]
    name = ".".join(path)
    if detail["type"] != "extra_forbidden":
        reason = detail["msg"][0].lower() + detail["msg"][1:]
        found = errors.describe(detail["input"])
        return f"Expected a legal `{name}`, found `{found}`: {reason}."
    legal = sorted(_fields_at(path[:-1], model))
    near = difflib.get_close_matches(path[-1], legal, n=1, cutoff=0.5)
    hint = f": did you mean `{'.'.join([*path[:-1], *near])}`?" if near else "."
    return f"Expected one of the settings {legal}, found `{name}`{hint}"


def _fields_at(path: list[str], model: type[pydantic.BaseModel]) -> list[str]:
    for part in path:
        annotation = model.model_fields[part].annotation
        if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
            model = annotation
    return list(model.model_fields)
