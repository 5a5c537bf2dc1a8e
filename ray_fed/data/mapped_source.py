"""A source whose rows a TensorFlow function makes of another one's."""

import uuid
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import federated_language as fl
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
from ray_fed.language.structs import Plain
from ray_fed.values.client_references import ClientSource

if TYPE_CHECKING:
    from ray_fed.tensorflow.front.row_maps import RowMap


class MappedSource(ClientSource):
    """Rows of another source, mapped.

    Args:
        base: its clients have a sequence of rows each.
        ids: of the clients, by position.
        row_map: of the rows.
    """

    is_resident = False

    def __init__(
        self, base: ClientSource, ids: Sequence[Hashable], row_map: "RowMap"
    ) -> None:
        self.token = uuid.uuid4().hex
        self.base: ClientSource | None = base
        self.ids = ids
        self.row_map = row_map

    @property
    @override
    def function(self) -> Callable[[Any], Any]:
        return self.row_map.function

    @override
    def over(self, base: ClientSource) -> "MappedSource":
        made = MappedSource(base, self.ids, self.row_map)
        made.token = self.token
        return made

    @override
    def read(self, position: int) -> Plain:
        return self.arrange(self.read_base(position), position)

    @override
    def arrange(self, value: Plain, position: int) -> Plain:
        label = f"what the function makes of the rows of {self.ids[position]!r}"
        try:
            return self.row_map.apply(value, label)
        except errors.RayFedError:
            raise
        except Exception as error:
            raise errors.ComputationError(
                f"Expected rows for the client with the id {self.ids[position]!r},"
                " found that the mapped function raised"
                f" {error_texts.summarize(error)}",
                cause_text=error_texts.traceback_of(error),
            ) from error


def map_rows(function: Callable[[Any], Any], row: fl.Type) -> "RowMap":
    """Return a function over rows, traced to learn the type of what it returns."""
    from ray_fed.tensorflow.front.row_maps import RowMap

    return RowMap(function, row)
