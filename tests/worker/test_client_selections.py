"""What keys select: one graph for all clients, with the bits of one call a key."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.executors.interpretation as interpretation
from ray_fed import tensorflow as rtf
from ray_fed.cluster.direct import RayExecutorFactory
from ray_fed.program import ClientData
from tests.fixtures import ContextFactory, report_of

ROWS = 6
TABLE = fl.StructType([("w", fl.TensorType(np.float32, [ROWS, 3])), ("n", np.int32)])
KEYS = fl.TensorType(np.int32, [4])


@rtf.computation(KEYS)
def same(keys: Any) -> Any:
    return keys + 0


def run_by(pick: Any, element: Any, *, computes_keys: bool = False) -> Any:
    """Return a computation that sums what `pick` selects of a table, by a capture."""

    @rtf.computation(fl.SequenceType(element), np.float32)
    def add_up(rows: Any, factor: Any) -> Any:
        def add(held: Any, row: Any) -> Any:
            return held[0] + row["a"] * factor, held[1] + 1

        total, count = rows.reduce((tf.zeros([3]), tf.zeros([], tf.int64)), add)
        return total / 3.0, count

    @fl.federated_computation(
        fl.FederatedType(KEYS, fl.CLIENTS),
        fl.FederatedType(TABLE, fl.SERVER),
        fl.FederatedType(np.float32, fl.SERVER),
    )
    def run(keys: Any, table: Any, factor: Any) -> Any:
        largest = fl.federated_value(ROWS - 1, fl.SERVER)
        if computes_keys:
            keys = fl.federated_map(same, keys)
        chosen = fl.federated_select(keys, largest, table, pick)
        sent = fl.federated_broadcast(factor)
        return fl.federated_sum(fl.federated_map(add_up, (chosen, sent)))

    return run


ELEMENT = fl.StructWithPythonType(
    [("a", fl.TensorType(np.float32, [3])), ("b", np.str_)], dict
)


@rtf.computation(TABLE, np.int32)
def gather(table: Any, key: Any) -> Any:
    row = tf.gather(table["w"], key) / tf.cast(table["n"], tf.float32)
    return {"a": row, "b": tf.strings.as_string(key)}


@rtf.computation(ELEMENT, np.float32)
def scale(element: Any, factor: Any) -> Any:
    return {"a": element["a"] * factor, "b": element["b"]}


@rtf.computation(TABLE, np.int32)
def draw(table: Any, key: Any) -> Any:
    del key
    return {"a": tf.random.uniform([3]) + table["w"][0], "b": tf.constant("")}


def arguments() -> tuple[list[Any], Any, Any]:
    rng = np.random.default_rng(0)
    keys = list(rng.integers(0, ROWS, (5, 4)).astype(np.int32))
    table = {"w": rng.normal(size=(ROWS, 3)).astype(np.float32), "n": np.int32(7)}
    return keys, table, np.float32(0.3)


@pytest.mark.parametrize("route", ["list", "placed"])
def test_rows_are_those_of_the_interpreter(
    local_contexts: ContextFactory, route: str
) -> None:
    keys, table, factor = arguments()
    work = run_by(gather, ELEMENT)
    given = ClientData.from_values(keys, KEYS) if route == "placed" else keys
    found: list[bytes] = []
    for enabled in (True, False):
        context = local_contexts(workers=2, kernels={"enabled": enabled})
        total, count = context.invoke(work, (given, table, factor))
        found.append(total.tobytes())
        report = report_of(context)
        assert (report.kernel_leaves > 0) == enabled
        assert count == 20

    assert found[0] == found[1]


def test_keys_that_clients_compute_have_the_bits_of_one_call_a_key(
    local_contexts: ContextFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    factor = np.float32(0.7)

    @fl.federated_computation(TABLE, np.int32)
    def capturing(table: Any, key: Any) -> Any:
        return scale(gather(table, key), factor)

    by_argument, by_clients = (
        run_by(capturing, ELEMENT, computes_keys=computes) for computes in (False, True)
    )
    context = local_contexts(workers=2)
    interpreting = local_contexts(workers=2, kernels={"enabled": False})

    (wanted, _), (found, _) = (
        context.invoke(work, arguments()) for work in (by_argument, by_clients)
    )
    of_all_keys, _ = interpreting.invoke(by_clients, arguments())
    monkeypatch.setattr(interpretation, "select_all", no_graph)
    one_by_one, _ = interpreting.invoke(by_clients, arguments())

    assert found.tobytes() == wanted.tobytes()
    assert of_all_keys.tobytes() == one_by_one.tobytes() == wanted.tobytes()


@pytest.mark.ray
def test_keys_that_clients_compute_are_one_graph_on_ray_too(
    ray_executors: RayExecutorFactory,
    local_contexts: ContextFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = run_by(gather, ELEMENT, computes_keys=True)
    expected, _ = local_contexts(workers=1).invoke(work, arguments())
    calls: list[Any] = []
    call: Any = interpretation.call_at_server

    async def note(*given: Any) -> Any:  # once for each key, where there is no graph
        calls.append(given)
        return await call(*given)

    monkeypatch.setattr(interpretation, "call_at_server", note)
    context = fl.framework.SyncExecutionContext(ray_executors)
    with fl.framework.get_context_stack().install(context):
        found, count = work(*arguments())

    assert calls == []
    assert count == 20
    np.testing.assert_allclose(found, expected, 1e-6)


async def no_graph(*_: Any) -> None:
    """Stand for an executor that has no graphs of fused work."""


def test_a_selection_that_draws_is_interpreted(local_contexts: ContextFactory) -> None:
    context = local_contexts(workers=1)

    context.invoke(run_by(draw, ELEMENT), arguments())

    report = report_of(context)
    assert report.kernel_leaves == 0
    assert any("state or effects" in reason for reason in report.no_kernel)
