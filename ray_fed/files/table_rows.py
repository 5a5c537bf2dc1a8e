"""The seam between an index of rows and where the rows lie."""

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_fed.files.row_index import IdCoder


class TableRows(abc.ABC):
    """Rows of a table, by their number; pickled without what it holds open.

    Attributes:
        label: what the table is called in an error.
        schema: of arrow.
    """

    label: str
    schema: Any

    @abc.abstractmethod
    def add_ids(self, column: str, coder: IdCoder) -> None:
        """Add the ids of all rows, in order, a bounded number at a time."""

    @abc.abstractmethod
    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        """Return columns of rows, ascending, as a table of arrow."""
