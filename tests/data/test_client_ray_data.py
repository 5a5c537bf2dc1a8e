"""Clients out of a Ray dataset, which Ray groups once."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.program import ClientData
from tests.data import tables

pytestmark = [pytest.mark.ray, pytest.mark.slow]

rtf_data_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@rtf_data_warnings
def test_dataset_is_grouped_and_read_by_workers(ray_contexts: Any) -> None:
    import ray.data

    context = ray_contexts(workers=2, subrounds=2)
    table = tables.make_table(6)
    dataset = ray.data.from_arrow(pa.table(tables.shuffled(table))).repartition(3)

    data = ClientData.from_ray(dataset, client="who", x="n", y="y", batch_size=2)
    texts = ClientData.from_ray(dataset, client="who", x="n", id_type=str)

    def add(count: Any, batch: Any) -> Any:
        return count + tf.size(batch["x"], tf.int64)

    total = tables.sum_over_clients(data, np.int64(0), add)
    assert context.invoke(total, data) == len(table["who"])
    for client, batches in tables.read(data).items():
        inside = table["who"] == client
        found = np.concatenate([x for x, _ in batches])
        assert sorted(found) == sorted(table["n"][inside])
    assert texts.ids == tuple(map(str, data.ids))
    with pytest.raises(errors.ConfigError, match="Did you mean `who`"):
        ClientData.from_ray(dataset, client="whom", x="n")


@rtf_data_warnings
def test_categories_that_no_row_has_are_no_clients(ray_contexts: Any) -> None:
    import ray.data

    ray_contexts(workers=2)
    codes = pa.array([1, 0, 1, 0])
    who = pa.DictionaryArray.from_arrays(codes, pa.array(["b", "a", "z"]))
    dataset = ray.data.from_arrow(pa.table({"who": who, "x": [1, 2, 3, 4], "w": who}))

    data = ClientData.from_ray(dataset, client="who", x={"x": "x", "w": "w"})

    found = {name: sorted(rows) for name, rows in tables.read(data).items()}
    assert found == {"a": [[1, b"a"], [3, b"a"]], "b": [[2, b"b"], [4, b"b"]]}


def test_what_is_no_dataset_is_refused(ray_contexts: Any) -> None:
    with pytest.raises(errors.ValueMismatchError, match=r"Expected a ray\.data"):
        ClientData.from_ray([1], client="who", x="n")
