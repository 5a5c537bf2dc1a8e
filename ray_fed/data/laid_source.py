"""A source of clients whose rows each machine lays by client, once."""

import threading
import uuid
import weakref
from typing import Any

from typing_extensions import override

from ray_fed.files import laid_sharing, laying
from ray_fed.files.laid_columns import LaidColumns
from ray_fed.language.structs import Plain
from ray_fed.values import read_limits
from ray_fed.values.client_references import ClientSource


class LaidSource(ClientSource):
    """Clients' rows; the first process of a machine that reads lays those of all.

    Args:
        table: of the rows.
    """

    is_resident = False

    def __init__(self, table: laying.ClientTable) -> None:
        self.token = uuid.uuid4().hex
        self._table = table
        self._prepare()
        # Workers of this machine may be killed before they can do so.
        weakref.finalize(self, laid_sharing.forget, self.token)

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._laid: LaidColumns | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {"token": self.token, "_table": self._table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    @override
    def read(self, position: int) -> Plain:
        read_limits.check()
        return self.laid.read(position)

    @property
    def laid(self) -> LaidColumns:
        """The rows of all clients, in files of this machine."""
        with self._lock:
            if self._laid is None:
                files = laid_sharing.share(self.token, self._lay)
                self._laid = LaidColumns(self._table.features.leaves, files)
            return self._laid

    def _lay(self) -> list[int]:
        files = laying.lay(self._table)
        weakref.finalize(self, laid_sharing.forget, self.token)
        return files
