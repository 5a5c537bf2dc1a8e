"""Leaves of clients of one shape: compiled by XLA, or several clients at once."""

import asyncio
import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.plan.plans as plans
import ray_fed.tensorflow.kernels.client_batches as client_batches
import ray_fed.tensorflow.kernels.client_kernel as client_kernel
import ray_fed.values.plain_values as plain_values
import ray_fed.worker.kernel_runner as kernel_runner
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.language import blocks
from ray_fed.plan import diagnostics, merge_tree, random_keys
from ray_fed.plan.random_keys import DrawKey
from ray_fed.worker.stacks import DeviceStack
from tests.stages import kernel_of, stage_of, summed

BATCH = fl.StructType(
    [
        ("x", fl.TensorType(np.float32, [None, 3])),
        ("y", fl.TensorType(np.float32, [None])),
    ]
)
BATCHES = fl.SequenceType(BATCH)
VECTORS = fl.SequenceType(fl.TensorType(np.float32, [3]))
ROWS = fl.TensorType(np.float32, [None, 3])
WAYS: dict[str, dict[str, Any]] = {
    "XLA": {"jit": "on"},
    "vectorized": {"vectorized_clients": 3},
    "both": {"jit": "on", "vectorized_clients": 3},
}
BOUND = 1e-5
"""Relative: what another order of a sum of tens may make of single precision."""


def descend(weights: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
    gradient: Any = tape.gradient(loss, weights)
    return weights - 0.1 * gradient


@rtf.computation(BATCHES)
def train(batches: Any) -> Any:
    def step(weights: Any, batch: Any) -> Any:
        return descend(weights, batch["x"], batch["y"])

    return batches.reduce(tf.ones([3]), step)


@rtf.computation(VECTORS)
def train_in_batches(vectors: Any) -> Any:
    def step(weights: Any, x: Any) -> Any:
        return descend(weights, x, tf.reduce_sum(x, 1))

    return vectors.batch(2).reduce(tf.ones([3]), step)


@rtf.computation(ROWS)
def total_of_rows(rows: Any) -> Any:
    return tf.reduce_sum(rows * rows, 0)


@rtf.computation(BATCHES)
def checked(batches: Any) -> Any:
    def step(total: Any, batch: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(batch["x"], 100.0)]):
            return total + tf.reduce_sum(batch["x"], 0)

    return batches.reduce(tf.zeros([3]), step)


@rtf.computation(BATCHES)
def checked_with_a_variable(batches: Any) -> Any:
    total = tf.Variable(tf.zeros([3]))

    def step(count: Any, batch: Any) -> Any:
        total.assign_add(tf.reduce_sum(batch["x"], 0))
        if count > 0:
            large = batch["x"] >= 100.0  # of data whose shape is not known
            shown = tf.boolean_mask(batch["x"], large)
            tf.debugging.Assert(tf.reduce_all(~large), [shown])
        for row in tf.range(2):
            tf.debugging.assert_less(batch["x"][row], 100.0)
        return count + 1

    batches.reduce(0, step)
    return total.read_value()


@rtf.computation(BATCHES)
def printing(batches: Any) -> Any:
    def step(total: Any, batch: Any) -> Any:
        tf.print("", end="")
        return total + tf.reduce_sum(batch["x"], 0)

    return batches.reduce(tf.zeros([3]), step)


@rtf.computation(BATCHES)
def drawing(batches: Any) -> Any:
    def step(total: Any, batch: Any) -> Any:
        return total + tf.reduce_sum(batch["x"], 0) * tf.random.normal([3])

    return batches.reduce(tf.zeros([3]), step)


@rtf.computation(ROWS)
def through_text(rows: Any) -> Any:
    return tf.strings.to_number(tf.strings.as_string(tf.reduce_sum(rows, 0)))


@rtf.computation(ROWS)
def looping(rows: Any) -> Any:
    def step(index: Any, total: Any) -> Any:
        return index + 1, total * 0.5 + rows[index]

    start = (0, tf.zeros([3]))
    return tf.while_loop(lambda index, _: index < tf.shape(rows)[0], step, start)[1]  # pyright: ignore[reportUnknownLambdaType]


def generator() -> np.random.Generator:
    return np.random.default_rng(5)


def batches(num_clients: int, sizes: Sequence[int] = (4, 4)) -> list[Any]:
    drawn = generator()
    return [
        [
            {
                "x": drawn.normal(size=(size, 3)).astype(np.float32),
                "y": drawn.normal(size=size).astype(np.float32),
            }
            for size in sizes
        ]
        for _ in range(num_clients)
    ]


def rows(num_clients: int, size: int = 5) -> list[Any]:
    return list(generator().normal(size=(num_clients, size, 3)).astype(np.float32))


CASES: dict[str, tuple[Any, list[Any]]] = {
    "batches": (train, batches(8)),
    "a last batch that is smaller": (train_in_batches, [list(r) for r in rows(8)]),
    "tensors": (total_of_rows, rows(8)),
    "fewer clients than a window": (total_of_rows, rows(5)),
    "more clients than a window": (total_of_rows, rows(80)),
}


def train_by_numpy(batches: Any) -> Any:
    weights = np.ones(3)
    for batch in batches:
        error = batch["x"] @ weights - batch["y"]
        weights = weights - 0.1 * 2 * (batch["x"].T @ error) / len(error)
    return weights


def train_in_batches_by_numpy(vectors: Any) -> Any:
    pairs = [np.array(vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
    return train_by_numpy([{"x": x, "y": x.sum(1)} for x in pairs])


def total_by_numpy(rows: Any) -> Any:
    return (rows.astype(np.float64) ** 2).sum(0)


BY_NUMPY = {
    train: train_by_numpy,
    train_in_batches: train_in_batches_by_numpy,
    total_of_rows: total_by_numpy,
}


@pytest.fixture(name="leaf")
def leaf_fixture() -> Iterator[DeviceStack]:
    leaf = stacks.device_stack()
    yield leaf
    leaf.close()


Shapes = list[Any]


class Prepared(NamedTuple):
    subround: plans.Subround
    work: Any


@pytest.fixture(name="shaped")
def shaped_fixture(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """Collects the shapes that graphs are made for."""
    shapes: Shapes = []

    class Noting(client_batches.ShapedClients):
        def __init__(self, client: Any, shape: Any, **options: Any):
            shapes.append(shape)
            super().__init__(client, shape, **options)

    monkeypatch.setattr(client_kernel, "ShapedClients", Noting)
    return shapes


def laid_out(data: Any, work: Any) -> list[Any]:
    member = work.type_signature.parameter
    return [plain_values.to_plain(client, member) for client in data]


def prepare(
    work: Any, clients_per_leaf: int, num_clients: int, **options: Any
) -> Prepared:
    comp = summed(work)
    leaves = merge_tree.cut_leaves(num_clients, clients_per_leaf)
    subround = plans.Subround(
        computation=b"",
        merge=blocks.serialize(stage_of(comp).merge.to_building_block()),
        clients_per_leaf=clients_per_leaf,
        first_leaf=0,
        leaves=tuple(leaves),
        draw=DrawKey(0, 0),
        subtrees=((0, len(leaves)),),
        kernel=dataclasses.replace(kernel_of(comp), **options),
    )
    return Prepared(subround, work)


def run(leaf: DeviceStack, prepared: Prepared, data: Any) -> Any:
    (partial,) = run_nodes(leaf, prepared, data)
    return partial


def run_nodes(leaf: DeviceStack, prepared: Prepared, data: Any) -> list[Any]:
    nodes = try_nodes(leaf, prepared, data)
    assert not isinstance(nodes, plans.Fallback), nodes
    return nodes


def try_nodes(
    leaf: DeviceStack, prepared: Prepared, data: Any
) -> list[Any] | plans.Fallback:
    """Return the partials, or why the leaves have to be interpreted."""

    async def ran() -> list[Any] | plans.Fallback:
        clients = laid_out(data, prepared.work)
        zeros = [np.zeros(3, np.float32)]
        told = await kernel_runner.run_leaves(leaf, prepared.subround, zeros, [clients])
        if isinstance(told, plans.Fallback):
            return told
        partials: list[Any] = told.values
        return [np.asarray(partial[0]) for partial in partials]

    with random_keys.using(prepared.subround.draw):
        return asyncio.run(ran())


def refusals(leaf: DeviceStack, prepared: Prepared) -> set[str]:
    subround = prepared.subround
    assert isinstance(subround.kernel, plans.Kernel)
    assert subround.merge is not None
    graph: Any = leaf.eager.kernels.clients(subround.kernel, subround.merge)
    assert not isinstance(graph, plans.Fallback)
    with diagnostics.noting() as noted:
        graph.shaped.note_refusals()
    return {note.reason for note in noted if isinstance(note, diagnostics.WorkUnshaped)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_one_client_at_a_time(
    leaf: DeviceStack, shaped: Shapes, case: str, way: str
) -> None:
    work, data = CASES[case]
    clients_per_leaf = max(4, len(data))

    prepared = prepare(work, clients_per_leaf, len(data), **WAYS[way])
    found = run(leaf, prepared, data)

    one_by_one = run(leaf, prepare(work, clients_per_leaf, len(data)), data)
    np.testing.assert_allclose(found, one_by_one, rtol=BOUND)
    by_numpy = sum(BY_NUMPY[work](client) for client in data)
    np.testing.assert_allclose(found, by_numpy, rtol=1e-4)
    assert len(shaped) == 1
    assert refusals(leaf, prepared) == set()


@pytest.mark.parametrize("way", WAYS)
def test_bits_do_not_depend_on_how_many_clients_a_call_covers(
    leaf: DeviceStack, way: str
) -> None:
    prepared = prepare(train, 8, 13, **WAYS[way])
    one_by_one = dataclasses.replace(prepared.subround, call_s=1e-9)
    data = batches(13)

    found = [
        run(leaf, Prepared(subround, train), data)
        for subround in (prepared.subround, one_by_one)
    ]

    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("way", WAYS)
def test_bits_do_not_depend_on_the_leaves_beside(leaf: DeviceStack, way: str) -> None:
    data = [*batches(4), *batches(4, [4, 2]), *batches(4)]
    subround = prepare(train, 4, 12, **WAYS[way]).subround
    nodes = ((0, 1), (1, 2), (2, 3))
    together = dataclasses.replace(subround, subtrees=nodes)

    found = run_nodes(leaf, Prepared(together, train), data)

    alone: list[Any] = []
    for index in range(3):
        one = dataclasses.replace(
            subround,
            first_leaf=index,
            leaves=subround.leaves[index : index + 1],
            subtrees=(nodes[index],),
        )
        part = data[4 * index : 4 * index + 4]
        alone += run_nodes(leaf, Prepared(one, train), part)
    np.testing.assert_array_equal(found, alone)


def test_leaf_of_clients_that_differ_runs_as_others_do(
    leaf: DeviceStack, shaped: Shapes
) -> None:
    data = [*batches(2), *batches(2, [4, 4, 4])]

    found = run(leaf, prepare(train, 4, 4, **WAYS["both"]), data)

    assert found.tobytes() == run(leaf, prepare(train, 4, 4), data).tobytes()
    assert shaped == []


@pytest.mark.parametrize("way", WAYS)
def test_checks_are_values_until_one_fails(
    leaf: DeviceStack, shaped: Shapes, way: str
) -> None:
    data = batches(4)
    prepared = prepare(checked, 4, 4, **WAYS[way])

    found = run(leaf, prepared, data)

    np.testing.assert_allclose(found, run(leaf, prepare(checked, 4, 4), data), BOUND)
    assert len(shaped) == 1
    assert refusals(leaf, prepared) == set()
    data[2][1]["x"][3, 0] = 200.0
    failed = try_nodes(leaf, prepared, data)
    assert failed == plans.Fallback("InvalidArgumentError in a kernel", 0)
    # The graph is not given up because a check of it failed.
    assert run(leaf, prepared, batches(4)).tobytes() == found.tobytes()
    assert refusals(leaf, prepared) == set()


@pytest.mark.parametrize(
    ("batch", "row", "fails"), [(0, 3, False), (0, 1, True), (1, 3, True)]
)
def test_checks_in_branches_and_loops_are_values(
    leaf: DeviceStack, shaped: Shapes, batch: int, row: int, fails: bool
) -> None:
    data, work = batches(4), checked_with_a_variable
    data[2][batch]["x"][row, 0] = 200.0

    found, wanted = (
        try_nodes(leaf, prepare(work, 4, 4, **options), data)
        for options in (WAYS["XLA"], {})
    )

    assert len(shaped) == 1
    assert isinstance(wanted, plans.Fallback) == fails
    if isinstance(found, plans.Fallback):
        assert found == wanted
    else:
        np.testing.assert_allclose(found, cast("Any", wanted), BOUND)


@pytest.mark.parametrize(
    ("work", "data", "reason"),
    [
        (drawing, batches(4), "RandomStandardNormal, an op with state or effects"),
        (printing, batches(4), "PrintV2, an op with state or effects"),
    ],
    ids=["draws", "prints"],
)
def test_work_with_state_or_effects_runs_as_without(
    leaf: DeviceStack, work: Any, data: Any, reason: str
) -> None:
    prepared = prepare(work, 4, 4, **WAYS["both"])

    found = run(leaf, prepared, data)

    assert found.tobytes() == run(leaf, prepare(work, 4, 4), data).tobytes()
    assert refusals(leaf, prepared) == {reason}


@pytest.mark.parametrize(
    ("work", "way", "reason"),
    [
        (through_text, "XLA", "InvalidArgumentError of XLA"),
        (looping, "vectorized", "AttributeError"),
    ],
    ids=["strings in XLA", "a loop, vectorized"],
)
def test_work_that_cannot_be_is_refused_with_the_reason(
    leaf: DeviceStack, work: Any, way: str, reason: str
) -> None:
    data = rows(4)
    prepared = prepare(work, 4, 4, **WAYS[way])

    with diagnostics.noting() as noted:
        found = run(leaf, prepared, data)

    assert found.tobytes() == run(leaf, prepare(work, 4, 4), data).tobytes()
    (told,) = refusals(leaf, prepared)
    assert reason in told
    assert noted == {diagnostics.WorkUnshaped(told)}


def test_leaf_of_clients_of_several_shapes_is_told_of(leaf: DeviceStack) -> None:
    with diagnostics.noting() as noted:
        run(leaf, prepare(total_of_rows, 4, 4, **WAYS["both"]), [*rows(2), *rows(2, 7)])

    assert noted == {
        diagnostics.WorkUnshaped("clients of a leaf have data of several shapes")
    }


COMPILED = """
import federated_language as fl
import numpy as np
import ray_fed
from ray_fed import tensorflow as rtf
import tensorflow as tf

config = ray_fed.Config(
    backend="local", workers=1, clients_per_leaf=5, kernels={"jit": "on"}
)
with ray_fed.create_context(config) as context:

    @rtf.computation(fl.TensorType(np.float32, [2, 3]))
    def work(x):
        return tf.reduce_sum(x * x, 0)

    @fl.federated_computation(
        fl.FederatedType(fl.TensorType(np.float32, [2, 3]), fl.CLIENTS)
    )
    def total(x):
        return fl.federated_sum(fl.federated_map(work, x))

    for num_clients in (13, 77):
        print(context.invoke(total, [np.ones([2, 3], np.float32)] * num_clients))
"""


@pytest.mark.slow
def test_xla_compiles_once_wherever_clients_lie(tmp_path: pathlib.Path) -> None:
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"

    run = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )

    assert run.stdout.split() == ["[26.", "26.", "26.]", "[154.", "154.", "154.]"]
    assert len(list(tmp_path.glob("*fold_window*.before_optimizations.txt"))) == 1


def test_several_clients_at_once_are_folded_in_their_order(leaf: DeviceStack) -> None:
    data = [np.full((1, 3), value, np.float32) for value in (1e4, 1.0, 1.0, 1e-4)]

    found = run(leaf, prepare(total_of_rows, 4, 4, vectorized_clients=4), data)

    folded = np.float32(0.0)
    for value in (1e4, 1.0, 1.0, 1e-4):
        folded += np.float32(value) * np.float32(value)
    assert found.tolist() == [float(folded)] * 3
