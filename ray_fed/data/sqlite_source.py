"""A source of clients in an SQLite file of `tf.train.Example`."""

import uuid
from collections.abc import Mapping
from typing import Any

import federated_language as fl
from typing_extensions import override

from ray_fed.files.sqlite_rows import SqliteRows
from ray_fed.language.structs import Plain
from ray_fed.values import read_limits
from ray_fed.values.client_references import ClientSource


class SqliteSource(ClientSource):
    """Clients' examples, parsed where they are read.

    Args:
        rows: of the file.
        features: of an example, and their types: see `examples.to_features`.

    Attributes:
        element: the type of an example.
    """

    is_resident = False

    def __init__(self, rows: SqliteRows, features: Mapping[str, Any]) -> None:
        from ray_fed.tensorflow.external import examples

        self.token = uuid.uuid4().hex
        self._rows = rows
        self._features = examples.to_features(features)
        self.element = fl.StructWithPythonType(list(self._features.items()), dict)

    @override
    def read(self, position: int) -> Plain:
        from ray_fed.tensorflow.external import examples

        read_limits.check()
        label = f"the rows of the client {self._rows.ids[position]!r}"
        return examples.parse(
            self._rows.read(position), self._features, f"{label} in {self._rows.label}"
        )
