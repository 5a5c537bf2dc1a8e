"""Sequences from files and from other computations: in kernels, with equal bits."""

import pathlib
from typing import Any

import federated_language as fl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tensorflow.external_data as external_data
from ray_fed import tensorflow as rtf
from ray_fed.files import opening
from ray_fed.program import ClientData
from tests.fixtures import ContextFactory, report_of

VECTOR = fl.TensorType(np.float32, [3])
ROW = fl.StructWithPythonType([("x", VECTOR), ("y", np.int32)], dict)
ROWS = fl.SequenceType(ROW)


@rtf.computation(ROWS, np.float32)
def scale(rows: Any, factor: Any) -> Any:
    table = tf.range(5)  # a constant of the first graph

    def change(row: Any) -> Any:
        y = tf.gather(table, row["y"])
        return {"x": row["x"] * factor / 3.0, "y": y}

    return rows.map(change)


@rtf.computation(ROWS)
def batch(rows: Any) -> Any:
    return rows.repeat(2).batch(4)


@rtf.computation(ROWS)
def shuffle(rows: Any) -> Any:
    return rows.shuffle(100).batch(4)


BATCHES: Any = batch.type_signature.result


@rtf.computation(BATCHES, np.float32)
def train(batches: Any, rate: Any) -> Any:
    def step(weights: Any, row: Any) -> Any:
        error = tf.linalg.matvec(row["x"], weights) - tf.cast(row["y"], tf.float32)
        gradient = tf.linalg.matvec(row["x"], error, transpose_a=True)
        return weights - rate * gradient / 7.0

    return batches.reduce(tf.zeros([3]), step)


@rtf.computation(BATCHES, np.float32)
def train_with_noise(batches: Any, rate: Any) -> Any:
    def step(weights: Any, row: Any) -> Any:
        noise = tf.random.normal([3])
        return weights - rate * tf.reduce_mean(row["x"], axis=0) + noise

    return batches.reduce(tf.zeros([3]), step)


def run_by(arrange: Any, work: Any) -> Any:
    @fl.federated_computation(fl.FederatedType(ROWS, fl.CLIENTS))
    def run(clients: Any) -> Any:
        rate = fl.federated_value(np.float32(0.1), fl.CLIENTS)
        scaled = fl.federated_map(scale, (clients, rate))
        batches = fl.federated_map(arrange, scaled)
        return fl.federated_mean(fl.federated_map(work, (batches, rate)))

    return run


def rows(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(count)
    return {
        "x": rng.normal(size=(count, 3)).astype(np.float32),
        "y": rng.integers(0, 5, count).astype(np.int32),
    }


def write(folder: pathlib.Path, suffix: str) -> list[Any]:
    """Return clients of 1 to 9 rows in files."""
    found: list[Any] = []
    for count in (3, 9, 1, 5):
        path = folder / f"{count}{suffix}"
        columns = rows(count)
        if suffix == ".npz":
            np.savez(path, **columns)
        else:
            lists = pa.FixedSizeListArray.from_arrays(columns["x"].ravel(), 3)
            pq.write_table(pa.table({"x": lists, "y": columns["y"]}), path)
        found.append(rtf.data(str(path), ROWS))
    return found


def lists() -> list[Any]:
    return [
        [{"x": x, "y": y} for x, y in zip(held["x"], held["y"], strict=True)]
        for held in map(rows, (3, 9, 1, 5))
    ]


def invoke(contexts: ContextFactory, work: Any, clients: Any, **kernels: Any) -> Any:
    context = contexts(workers=1, kernels=kernels)
    result = context.invoke(work, clients)
    report = report_of(context)
    return result.tobytes(), report


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_rows_of_files_are_batched_in_kernels_with_the_bits_of_the_interpreter(
    local_contexts: ContextFactory, tmp_path: pathlib.Path, suffix: str
) -> None:
    work, clients = run_by(batch, train), write(tmp_path, suffix)

    fast, report = invoke(local_contexts, work, clients)
    slow, _ = invoke(local_contexts, work, clients, enabled=False)
    placed, _ = invoke(local_contexts, work, lists())

    assert report.kernel_leaves > 0
    assert (report.no_kernel, report.unlowered) == ((), ())
    assert fast == slow == placed


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_file_is_read_again_once_it_changed(
    local_contexts: ContextFactory,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
) -> None:
    monkeypatch.setattr(opening, "_COARSE_S", -1.0)  # as if files were old
    work, clients = run_by(batch, train), write(tmp_path, suffix)
    context, read = local_contexts(workers=1), list[str]()
    read_if_small = external_data.read_if_small

    def noting(uri: str, type_spec: Any) -> Any:
        read.append(pathlib.Path(uri).stem)
        return read_if_small(uri, type_spec)

    monkeypatch.setattr(external_data, "read_if_small", noting)

    found = [context.invoke(work, cut).tobytes() for cut in (clients, clients[::-1])]
    (tmp_path / f"9{suffix}").write_bytes((tmp_path / f"1{suffix}").read_bytes())
    found.append(context.invoke(work, clients).tobytes())

    assert read == ["3", "9", "1", "5", "9"]
    swapped = [lists()[index] for index in (0, 2, 2, 3)]
    expected = [
        invoke(local_contexts, work, placed)[0]
        for placed in (lists(), lists()[::-1], swapped)
    ]
    assert found == expected


@fl.federated_computation(
    fl.FederatedType(ROWS, fl.CLIENTS), fl.FederatedType(np.float32, fl.CLIENTS)
)
def beside_rates(clients: Any, rates: Any) -> Any:
    batches = fl.federated_map(batch, clients)
    return fl.federated_mean(fl.federated_map(train, (batches, rates)))


@pytest.mark.parametrize("has_rates", [True, False], ids=["beside values", "alone"])
def test_changed_files_of_client_data_are_read_again(
    local_contexts: ContextFactory,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_rates: bool,
) -> None:
    monkeypatch.setattr(opening, "_COARSE_S", -1.0)
    held = ClientData.from_values(write(tmp_path, ".npz"), ROWS)
    context = local_contexts(workers=1)
    rates = [np.float32(0.1)] * 4

    def ask(clients: Any) -> bytes:
        work, arg = run_by(batch, train), clients
        if has_rates:
            work, arg = beside_rates, (clients, rates)
        return context.invoke(work, arg).tobytes()

    found = [ask(held) for _ in range(3)]
    (tmp_path / "9.npz").write_bytes((tmp_path / "1.npz").read_bytes())
    found.append(ask(held))

    report = report_of(context)
    assert report.kernel_leaves > 0
    swapped = [lists()[index] for index in (0, 2, 2, 3)]
    assert found == [ask(lists())] * 3 + [ask(swapped)]


@pytest.mark.parametrize(
    ("arrange", "work", "reason"),
    [(shuffle, train, "in a sequence result"), (batch, train_with_noise, "in work on")],
    ids=["shuffles", "noise"],
)
def test_what_draws_is_interpreted(
    local_contexts: ContextFactory, arrange: Any, work: Any, reason: str
) -> None:
    composed = run_by(arrange, work)

    fast, report = invoke(local_contexts, composed, lists())
    slow, _ = invoke(local_contexts, composed, lists(), enabled=False)

    assert report.kernel_leaves == 0
    assert [reason in told for told in report.no_kernel] == [True], report.no_kernel
    assert fast == slow


def test_files_that_are_too_large_are_read_as_they_go(
    local_contexts: ContextFactory,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, clients = run_by(batch, train), write(tmp_path, ".npz")
    monkeypatch.setattr(external_data, "FILE_BYTES", 100)

    found, report = invoke(local_contexts, work, clients)
    wanted, _ = invoke(local_contexts, work, clients, enabled=False)

    assert report.kernel_leaves == 0
    assert found == wanted


def test_a_file_that_does_not_fit_names_its_client(
    local_contexts: ContextFactory, tmp_path: pathlib.Path
) -> None:
    clients = write(tmp_path, ".npz")
    np.savez(
        tmp_path / "1.npz", x=np.zeros([1, 4], np.float32), y=np.zeros(1, np.int32)
    )

    with pytest.raises(errors.ValueMismatchError, match=r"1\.npz.*float32\[1, 4\]"):
        invoke(local_contexts, run_by(batch, train), clients)
