"""Rounds over a table that workers sorted by client, while these workers are killed."""

import pathlib
from typing import Any

import federated_language as fl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import ray_fed
from ray_fed import tensorflow as rtf
from ray_fed.program import ClientData
from tests.data import tables

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]


@rtf.computation(tables.BATCHES)
def add_up(batches: Any) -> Any:
    def add(total: Any, batch: Any) -> Any:
        return total / 3.0 + tf.reduce_sum(batch["x"], axis=0)

    return batches.reduce(tf.zeros([2]), add)


@fl.federated_computation(fl.FederatedType(tables.BATCHES, fl.CLIENTS))
def total(clients: Any) -> Any:
    return fl.federated_sum(fl.federated_map(add_up, clients))


def test_rows_are_sorted_anew_where_their_worker_is_killed(
    contexts: Any, kill: Any, tmp_path: pathlib.Path
) -> None:
    table = tables.make_table(24)
    rows = pa.table(tables.shuffled(table))
    pq.write_table(rows, tmp_path / "t.parquet", row_group_size=9)
    data = ClientData.from_parquet(
        tmp_path / "t.parquet", client="who", x=["a", "b"], y="y", batch_size=3
    )
    cohorts = [data[start : start + 8] for start in (0, 8, 16)]
    with ray_fed.create_context(
        ray_fed.Config(backend="local", clients_per_leaf=2)
    ) as local:
        expected = [local.invoke(total, cohort).tobytes() for cohort in cohorts]
    context = contexts(workers=2, subrounds=2)

    found: list[bytes] = []
    for cohort in cohorts:
        found.append(context.invoke(total, cohort).tobytes())
        for pid in {s.worker_pid for s in context.last_report.subrounds}:
            kill(pid)

    assert found == expected
