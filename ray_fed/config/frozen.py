"""What all settings are: frozen, strict about names, and brief when they are shown."""

import html
from collections.abc import Iterator
from typing import Any

import pydantic
from typing_extensions import override

import ray_fed.config.sources as sources
import ray_fed.errors as errors


class Frozen(pydantic.BaseModel):
    """Settings, which show what differs from their defaults."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    @override
    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Return what differs from the defaults."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.get_default(call_default_factory=True):
                yield name, value

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name}</td><td>{html.escape(repr(value))}</td></tr>"
            for name, value in self.__repr_args__()
        )
        name = type(self).__name__
        return (
            f"<table><caption>{name}: what differs from the defaults</caption>"
            f"<tbody>{rows or '<tr><td>nothing</td></tr>'}</tbody></table>"
        )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except pydantic.ValidationError as error:
            raise errors.ConfigError(sources.explain(error, type(self))) from error

    # pydantic builds nested settings past this `__init__`: errors name the full path.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]
