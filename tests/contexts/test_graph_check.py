"""Python functions in graphs run in the process that traced them, or nowhere."""

# pyright: reportUnknownLambdaType=false

import pathlib
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.cluster.direct import RayExecutorFactory
from ray_fed.contexts.first_calls import ComputationChecks
from ray_fed.framework import (
    MergeableCompForm,
    deserialize_computation,
    serialize_computation,
)
from ray_fed.language import blocks
from ray_fed.program import ClientData
from tests.fixtures import ContextFactory
from tests.forms import sum_parts

SEQUENCE = fl.SequenceType(np.int32)


def _five() -> Any:
    return np.int32(5)


def _numpy(x: Any) -> Any:
    return x + tf.ensure_shape(tf.numpy_function(_five, [], tf.int32), [])


def _stateless(x: Any) -> Any:
    five = tf.numpy_function(_five, [], tf.int32, stateful=False)
    return x + tf.ensure_shape(five, [])


def _eager(x: Any) -> Any:
    return x + tf.ensure_shape(tf.py_function(_five, [], tf.int32), [])


def _generator(x: Any) -> Any:
    spec = tf.TensorSpec([], tf.int32)
    fives = tf.data.Dataset.from_generator(lambda: [_five()], output_signature=spec)
    return fives.reduce(x, lambda total, five: total + five)


def _in_dataset(x: Any) -> Any:
    return tf.data.Dataset.from_tensors(x).map(_numpy).get_single_element()


def _in_function(x: Any) -> Any:
    return tf.function(tf.function(_numpy))(x)


def _in_computation(x: Any) -> Any:
    return rtf.computation(_numpy, np.int32)(x)


WORK = {
    "numpy": _numpy,
    "stateless": _stateless,
    "eager": _eager,
    "generator": _generator,
    "dataset": _in_dataset,
    "function": _in_function,
    "computation": _in_computation,
}
KINDS = pytest.mark.parametrize("work", WORK.values(), ids=WORK)


def _sum_of(work: Any) -> Any:
    @fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
    def comp(values: Any) -> Any:
        return fl.federated_sum(fl.federated_map(work, values))

    return comp


def _load(client: int) -> Any:
    """Return a dataset through a Python function: TensorFlow numbers it `pyfunc_0`."""

    def thousands() -> Any:
        return np.int32(3000)

    made = tf.data.Dataset.from_tensors(np.int32(client)).map(
        lambda _: tf.ensure_shape(tf.numpy_function(thousands, [], tf.int32), [])
    )
    next(iter(made))
    return made


@rtf.computation(SEQUENCE)
def _total(dataset: Any) -> Any:
    return dataset.reduce(np.int32(0), lambda total, x: total + x)


@fl.federated_computation(fl.FederatedType(SEQUENCE, fl.CLIENTS))
def _totals(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(_total, data))


@pytest.mark.slow
@KINDS
def test_this_process_runs_its_own(local_contexts: ContextFactory, work: Any) -> None:
    comp = _sum_of(rtf.computation(work, np.int32))

    result = local_contexts(workers=2).invoke(comp, [1, 2, 3])

    assert result == 6 + 3 * 5


@pytest.mark.slow
@pytest.mark.ray
def test_workers_run_none(ray_contexts: ContextFactory) -> None:
    context = ray_contexts(workers=2)
    data = ClientData.from_function(range(4), _load, SEQUENCE)
    loaded = context.invoke(_totals, data)  # a Python function in each worker's table
    comp = _sum_of(rtf.computation(_in_dataset, np.int32))

    with pytest.raises(errors.UnsupportedError, match="Python functions"):
        context.invoke(comp, [0, 0])

    assert loaded == 4 * 3000


@pytest.mark.ray
def test_refused_before_any_client_works(
    ray_contexts: ContextFactory, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "ran")

    @rtf.computation(np.int32)
    def leave_a_file(x: Any) -> Any:
        with tf.control_dependencies([tf.io.write_file(path, "ran")]):
            return tf.identity(x)

    last = rtf.computation(_numpy, np.int32)

    @fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
    def comp(values: Any) -> Any:
        first = fl.federated_sum(fl.federated_map(leave_a_file, values))
        return fl.federated_map(last, first)

    with pytest.raises(errors.UnsupportedError, match=r"`_numpy` \(test_graph_check"):
        ray_contexts(workers=2).invoke(comp, [1, 2])

    assert not pathlib.Path(path).exists()


def _form_with(merge: Callable[[Any, Any], Any], total: Any) -> MergeableCompForm:
    @fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
    def up_to_merge(values: Any) -> Any:
        return total(values)

    merging = rtf.computation(merge, np.int32, np.int32)
    _, _, merged_alone = sum_parts(np.int32)
    parts: list[Any] = [up_to_merge, merging, merged_alone]
    return MergeableCompForm(*parts)


@pytest.mark.ray
def test_form_with_python_functions_is_refused(ray_contexts: ContextFactory) -> None:
    form = _form_with(lambda x, y: _numpy(x + y), fl.federated_sum)

    with pytest.raises(errors.UnsupportedError, match="Python functions"):
        ray_contexts(workers=2).invoke(form, [1, 2])


def test_only_a_part_with_python_functions_is_walked_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walked: list[Any] = []
    walk = fl.framework.visit_postorder

    def note(block: Any, visit: Any) -> None:
        walked.append(block)
        walk(block, visit)

    form = _form_with(lambda x, y: _numpy(x + y), fl.federated_sum)
    checks = ComputationChecks(in_process=True)
    monkeypatch.setattr(fl.framework, "visit_postorder", note)

    for _ in range(3):
        checks.check(form)

    assert len(walked) == 1


@pytest.mark.slow
@pytest.mark.ray
def test_worker_refuses_what_it_did_not_trace(
    ray_executors: RayExecutorFactory,
) -> None:
    context = fl.framework.SyncExecutionContext(ray_executors)
    comp = _sum_of(rtf.computation(_numpy, np.int32))

    with pytest.raises(errors.UnsupportedError, match="Python functions"):
        context.invoke(comp, [0, 0])


def _without_debug_info(comp: Any) -> Any:
    proto = comp.to_proto()
    graph_def = tf.compat.v1.GraphDef()
    proto.tensorflow.graph_def.Unpack(graph_def)
    graph_def.ClearField("debug_info")
    proto.tensorflow.graph_def.Pack(graph_def)
    block = blocks.to_block(proto)
    assert block is not None
    return fl.framework.ConcreteComputation.from_building_block(block)


@KINDS
def test_graph_of_an_unknown_process_is_refused(
    local_contexts: ContextFactory, work: Any
) -> None:
    foreign = _without_debug_info(rtf.computation(work, np.int32))

    with pytest.raises(errors.UnsupportedError, match="Python functions"):
        local_contexts(workers=2).invoke(foreign, 1)


def test_computation_traced_around_a_foreign_one_is_refused() -> None:
    foreign = _without_debug_info(rtf.computation(_numpy, np.int32))

    with pytest.raises(errors.UnsupportedError, match="Python functions"):
        rtf.computation(lambda x: foreign(x) + 1, np.int32)


def test_serialized_computation_comes_back_to_its_process(
    local_contexts: ContextFactory,
) -> None:
    comp = rtf.computation(_numpy, np.int32)
    copy = deserialize_computation(serialize_computation(comp))

    assert local_contexts(workers=1).invoke(copy, 1) == 6


def test_a_word_like_an_op_is_no_python_function(
    local_contexts: ContextFactory,
) -> None:
    @rtf.computation
    def word() -> Any:
        return tf.constant("PyFunc GeneratorDataset")

    assert local_contexts(workers=1).invoke(word) == b"PyFunc GeneratorDataset"
