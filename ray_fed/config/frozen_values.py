"""Mappings and lists in settings: equal to plain ones, and never changed."""

from collections.abc import Mapping
from typing import Any, NoReturn, cast

from typing_extensions import override

import ray_fed.errors as errors


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise errors.ConfigError(
        "Expected settings that stay as they are, found a change of one: build new"
        " settings with other values."
    )


class FrozenMapping(dict[str, Any]):
    """A dict that refuses changes; it is dumped and pickled as a dict is.

    Its hash is that of its names, as values need not have one.
    """

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    @override
    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self))

    @override
    def __reduce__(self) -> Any:
        return FrozenMapping, (dict(self),)


class FrozenList(list[Any]):
    """A list that refuses changes; it is dumped and pickled as a list is."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = _refuse
    reverse = sort = _refuse

    @override
    def __reduce__(self) -> Any:
        return FrozenList, (list(self),)


def freeze(value: Any) -> Any:
    """Return a value whose mappings and lists are frozen copies, at all depths."""
    match value:
        case Mapping():
            items = cast("Mapping[str, Any]", value).items()
            return FrozenMapping((name, freeze(member)) for name, member in items)
        case list():
            return FrozenList(map(freeze, cast("list[Any]", value)))
        case _:
            return value
