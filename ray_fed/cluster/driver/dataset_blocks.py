"""Rows of a Ray dataset, sorted once: in blocks that stay in the object store."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.util.client import ray as ray_client
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.cluster import workers
from ray_fed.cluster.driver import task_cpus
from ray_fed.cluster.jobs import Job
from ray_fed.cluster.store.stored_sources import fetch
from ray_fed.files import opening
from ray_fed.files.arrow_types import decoded_table
from ray_fed.files.features import check_columns
from ray_fed.files.parquet import take_rows
from ray_fed.files.table_rows import IdCoder, TableRows


class DatasetBlocks(TableRows):
    """The rows of a dataset, grouped by client.

    Args:
        dataset: a `ray.data.Dataset`; read, sorted and kept until this is gone.
        client: the column of its clients.
        columns: that must be there.

    Raises:
        ConfigError: a column is not there.
        ValueMismatchError: it is no dataset, or has no rows.
        UnsupportedError: this process is joined by Ray's client.
        ResourceError: workers leave no CPU to read and sort it.
        ContextStateError: `ray.shutdown` ended what holds it.
    """

    label = "the dataset"

    def __init__(self, dataset: Any, client: str, columns: Sequence[str]) -> None:
        if not hasattr(dataset, "to_arrow_refs"):
            raise errors.ValueMismatchError(
                f"Expected a ray.data.Dataset, found {errors.describe(dataset)}."
            )
        if ray_client.is_connected():
            raise errors.UnsupportedError(
                "Expected a process of the cluster for a dataset of Ray Data, found one"
                " that joined it by Ray's client (`ray://`): run the program by `ray"
                " job submit`, or read files, as by ClientData.from_parquet."
            )
        names = list(dict.fromkeys(columns))
        self._job: Job | None = Job.current()
        with self._job.explained():
            self._blocks: list[Any] = task_cpus.run_tasks(
                lambda: self._group(dataset, client, names),
                "a dataset of Ray Data",
                self._read_cpus,
            )
            self._ids = [workers.pick_column.remote(b, client) for b in self._blocks]
            heads = [fetch(workers.count_rows.remote(block)) for block in self._blocks]
        sizes, schemas = zip(*heads, strict=True) if self._blocks else ((), ())
        filled = [schema for size, schema in zip(sizes, schemas, strict=True) if size]
        if not filled:
            raise errors.ValueMismatchError(
                "Expected rows of clients in the dataset, found none."
            )
        self.schema = filled[0]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def _check(self) -> None:
        if self._job is not None:  # a worker's copy has none
            self._job.check()

    def _fetch(self, reference: Any) -> Any:
        self._check()
        return fetch(reference)

    def _read_cpus(self) -> task_cpus.TaskCpus:
        self._check()
        return task_cpus.read()

    def _group(self, dataset: Any, client: str, names: list[str]) -> list[Any]:
        found: list[str] = list(dataset.columns() or ())
        check_columns(names, found, self.label)
        # Arrow sorts no dictionaries.
        plain = dataset.select_columns(names).map_batches(
            decoded_table, batch_format="pyarrow", batch_size=None
        )
        return plain.sort(client).materialize().to_arrow_refs()

    @override
    def __getstate__(self) -> dict[str, Any]:
        self._check()
        return self.__dict__ | {"_ids": [], "_job": None}

    @override
    def add_ids(self, column: str, coder: IdCoder) -> None:
        for reference in self._ids:
            for chunk in self._fetch(reference).column(column).chunks:
                coder.add(chunk)
        self._ids = []

    @override
    def take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        pyarrow: Any = opening.import_extra("pyarrow")
        indices = np.searchsorted(self._ends, rows, side="right")
        parts: list[Any] = []
        for index in np.unique(indices):
            block = self._fetch(self._blocks[index]).select(list(columns))
            inside = rows[indices == index] - self._ends[index] + block.num_rows
            parts.append(take_rows(block, inside))
        return pyarrow.concat_tables(parts) if parts else self.schema.empty_table()
