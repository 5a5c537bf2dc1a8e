"""Describes objects in JSON, to check that a resumed program passes equal objects.

A description is equal for equal values, in every process. It is saved, and compared
with the description of the object that the resumed program passes.
"""

import dataclasses
import dis
import functools
import hashlib
import json
import logging
import re
import types
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, cast

import numpy as np

from ray_fed.data import ClientData

_logger = logging.getLogger(__name__)


def digest(content: bytes) -> str:
    """Return a short hash of some bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def describe_part(part: str, value: Any) -> dict[str, Any]:
    """Return the class and the parameters of an object of a run, as JSON by name.

    The parameters are the fields of a dataclass, the text of the object's own
    `__repr__`, or its attributes. `part` is the object's role: "sampler", "devices" or
    "schedule".
    """
    unknown: list[str] = []
    described = describe_value(value, unknown.append)
    if unknown:
        _logger.warning(
            "The %s has `%s`, whose text does not show its parameters. So a resumed"
            " run cannot check that it has the same %s. Make the object a dataclass,"
            " or give it a `__repr__`.",
            *(part, ", ".join(dict.fromkeys(unknown)), part),
        )
    if not isinstance(described, dict):
        return {part: described}
    named = cast("dict[str, Any]", described)
    fields = {f"{part}:{k}": v for k, v in named.items() if k != "class"}
    return {part: named["class"], **fields}


_SHOWN_ITEMS = 8
"""Largest number of items of a list in a description. A longer list is hashed."""


def describe_value(
    value: Any,
    note_unknown: Callable[[str], None] = lambda _: None,
    around: tuple[int, ...] = (),
) -> Any:
    """Return JSON that is the same for equal values, in every process.

    `note_unknown` is called with the `repr` of each object whose `repr` does not show
    its parameters. `around` has the `id` of each object that contains the value.
    """
    if id(value) in around:
        return f"the object {len(around) - around.index(id(value))} levels above"
    describe = functools.partial(
        describe_value, note_unknown=note_unknown, around=(*around, id(value))
    )
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return repr(value)
        case np.ndarray() | np.generic():
            return _describe_array(np.asarray(value))
        case bytes():
            return digest(value)
        case Mapping():
            pairs = cast("Mapping[Any, Any]", value).items()
            return _limit([[describe(k), describe(v)] for k, v in pairs])
        case AbstractSet():
            members = cast("AbstractSet[Any]", value)
            return _limit(sorted((describe(member) for member in members), key=repr))
        case list() | tuple():
            return _limit([describe(each) for each in cast("list[Any]", value)])
        case functools.partial():
            return _limit([*map(describe, (value.func, value.args, value.keywords))])
        case types.FunctionType():
            return _describe_function(value, describe)
        case ClientData():
            return [describe(value.ids), value.describe()]
        case types.CodeType():
            parts = (value.co_code.hex(), value.co_consts, value.co_names)
            return [describe(part) for part in parts]
        case _:
            return _describe_object(value, describe, note_unknown)


def _describe_array(array: Any) -> Any:
    if array.size == 1 and array.dtype.kind in "biuf":
        return repr(array.item())
    content = array.tobytes()
    if array.dtype.hasobject:
        content = repr(array.tolist()).encode()
    return f"{array.dtype}{list(array.shape)} {digest(content)}"


_SETTINGS = (bool, int, float, str, bytes, tuple, list, Mapping, np.ndarray, np.generic)
"""Types of global variables that belong to the description of a function."""


def _describe_function(function: Any, describe: Callable[[Any], Any]) -> Any:
    inside = [each.cell_contents for each in function.__closure__ or ()]
    used = find_globals(function).items()
    settings = {k: v for k, v in used if isinstance(v, _SETTINGS)}
    defaults = function.__defaults__, function.__kwdefaults__
    parts = (function.__code__, inside, settings, *defaults)
    described = [describe(part) for part in parts]
    return f"{function.__qualname__} {digest(repr(described).encode())}"


def find_globals(function: Any) -> dict[str, Any]:
    """Return the global variables that a function reads, by name."""
    codes, names = [function.__code__], set[str]()
    for code in codes:  # which grows: functions can be inside
        steps = dis.get_instructions(code)
        names |= {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    known = function.__globals__
    return {name: known[name] for name in sorted(names & known.keys())}


def _describe_object(
    value: Any, describe: Callable[[Any], Any], note_unknown: Callable[[str], None]
) -> Any:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    kind = type(value)
    if hasattr(value, "__array__"):  # such as a pandas.Series, whose text is cut
        return [kind.__qualname__, _describe_array(np.asarray(value))]
    fields: Mapping[str, Any] | None = None
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if "__dataclass_fields__" not in vars(kind):  # a subclass has attributes, too
            fields |= getattr(value, "__dict__", {})
    elif kind.__repr__ is object.__repr__:
        fields = getattr(value, "__dict__", None)
    if fields:
        described = {name: describe(each) for name, each in fields.items()}
        return {"class": kind.__qualname__, **described}
    with np.printoptions(threshold=2**62):  # or the middle of an array is left out
        shown = repr(value)
    text = _strip(shown)
    if text != shown:
        note_unknown(text)
    return text


def _limit(described: list[Any]) -> Any:
    if len(described) <= _SHOWN_ITEMS:
        return described
    return f"{len(described)} items {digest(json.dumps(described).encode())}"


def _strip(text: str) -> str:
    """Remove addresses of objects and places in source files from a text."""
    return re.sub(' at 0x[0-9a-f]+(, file "[^"]*", line [0-9]+)?', "", text)
