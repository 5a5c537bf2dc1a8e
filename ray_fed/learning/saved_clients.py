"""Values of clients in a run that is saved: a checkpoint names the segments it has."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from typing_extensions import override

from ray_fed.learning.client_states import ClientStates
from ray_fed.learning.segments import Segments
from ray_fed.learning.state_rows import ClientRows, FrozenRows


class SavedClientStates(ClientStates):
    """Values of clients, none yet, that are saved from time to time.

    Args:
        initial: as of `ClientStates`.
        folder: of this run alone: what memory has no room for is written where values
            are saved, and stays there until `collect`.
        memory_bytes: as of `ClientStates`.
    """

    def __init__(self, initial: Any, folder: str, *, memory_bytes: int) -> None:
        super().__init__(initial, memory_bytes=memory_bytes)
        self._segments = Segments(folder, self._row_bytes, removes=False)
        self._rows = ClientRows(self._max_rows, self._segments)

    def take_over(self, names: Sequence[str]) -> None:
        """Take the values that a run saved, as `FrozenRows.write` named them.

        Raises:
            StorageError: they cannot be read.
            SavedStateError: they are damaged, or not there.
        """
        assert self._segments is not None
        self._segments.take_over(names)

    def freeze(self) -> FrozenRows:
        """Return what clients have now, to be saved at any time."""
        return self._rows.freeze()

    def collect(self, keep: AbstractSet[str]) -> None:
        """Remove what neither these values nor saved ones need.

        Args:
            keep: names that `FrozenRows.write` returned for those.
        """
        self._rows.collect(keep)

    @override
    def close(self) -> None:
        """Do nothing: what is saved stays."""
