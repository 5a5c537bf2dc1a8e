"""Files as values of federated computations: in bodies, in arguments, on backends."""

# pyright: reportUnknownLambdaType=false

import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
import ray_fed.values.plain_values as plain_values
from ray_fed import tensorflow as rtf
from ray_fed.files import opening
from tests.fixtures import ContextFactory

Invoke = Callable[[Any, Any], Any]
FilesOf = Callable[[int], list[str]]

NUMBERS = fl.SequenceType(np.float32)
AT_CLIENTS = fl.FederatedType(NUMBERS, fl.CLIENTS)
AT_SERVER = fl.FederatedType(NUMBERS, fl.SERVER)


@rtf.computation(NUMBERS)
def total(dataset: Any) -> Any:
    return dataset.reduce(np.float32(0), lambda x, y: x + y)


@rtf.computation(NUMBERS, np.float32)
def scaled_total(dataset: Any, scale: Any) -> Any:
    return scale * dataset.reduce(np.float32(0), lambda x, y: x + y)


@fl.federated_computation(AT_CLIENTS)
def totals(data: Any) -> Any:
    return fl.federated_map(total, data)


@fl.federated_computation(AT_CLIENTS)
def mean_of_totals(data: Any) -> Any:
    return fl.federated_mean(fl.federated_map(total, data))


@fl.federated_computation(AT_SERVER)
def total_at_server(data: Any) -> Any:
    return fl.federated_map(total, data)


@pytest.fixture
def write(tmp_path: pathlib.Path) -> FilesOf:
    """Writes a file for each client, with the numbers below the client's own."""

    def write(num_clients: int) -> list[str]:
        paths = [tmp_path / f"client_{i}.npz" for i in range(num_clients)]
        for index, path in enumerate(paths):
            np.savez(path, x=np.arange(index + 1, dtype=np.float32))
        return [str(path) for path in paths]

    return write


def test_argument_names_a_file_for_each_client(invoke: Invoke, write: FilesOf) -> None:
    data = [rtf.data(path, NUMBERS) for path in write(4)]

    assert invoke(totals, data) == [0.0, 1.0, 3.0, 6.0]
    assert invoke(mean_of_totals, data) == 2.5


def test_files_and_values_may_stand_side_by_side(
    invoke: Invoke, write: FilesOf
) -> None:
    first, second = write(2)
    data = [rtf.data(second, NUMBERS), [np.float32(5)], rtf.data(first, NUMBERS)]

    assert invoke(totals, data) == [1.0, 5.0, 0.0]


def test_argument_at_the_server_names_a_file(invoke: Invoke, write: FilesOf) -> None:
    path = write(3)[2]

    assert invoke(total_at_server, rtf.data(path, NUMBERS)) == 3.0
    assert invoke(total_at_server, rtf.data(path, AT_SERVER)) == 3.0


def test_file_in_the_body_at_the_server(invoke: Invoke, write: FilesOf) -> None:
    path = write(3)[2]

    @fl.federated_computation
    def comp() -> Any:
        placed = fl.federated_value(rtf.data(path, NUMBERS), fl.SERVER)
        declared: Any = rtf.data(path, AT_SERVER)
        return fl.federated_map(total, placed), fl.federated_map(total, declared)

    assert invoke(comp, None) == (3.0, 3.0)


def test_file_in_the_body_at_all_clients(invoke: Invoke, write: FilesOf) -> None:
    path = write(3)[2]

    @fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
    def comp(scales: Any) -> Any:
        data = fl.federated_value(rtf.data(path, NUMBERS), fl.CLIENTS)
        pairs = fl.federated_zip((data, scales))
        return fl.federated_sum(fl.federated_map(scaled_total, pairs))

    assert invoke(comp, [1.0, 2.0, 4.0]) == 21.0


def test_file_of_a_whole_tensor_in_a_structure(invoke: Invoke, write: FilesOf) -> None:
    path = write(3)[2]
    vector = fl.TensorType(np.float32, [3])

    @rtf.computation(vector, np.float32)
    def scale(x: Any, y: Any) -> Any:
        return x * y

    @fl.federated_computation(
        fl.FederatedType([vector, np.float32], fl.CLIENTS),
    )
    def comp(pairs: Any) -> Any:
        return fl.federated_sum(fl.federated_map(scale, pairs))

    pairs = [(rtf.data(path, vector), 2.0), (rtf.data(path, vector), 3.0)]

    np.testing.assert_array_equal(invoke(comp, pairs), [0, 5, 10])


def test_missing_file_is_an_error_with_its_name(invoke: Invoke, write: FilesOf) -> None:
    data = [rtf.data(path, NUMBERS) for path in [*write(2), "/no/such/client.npz"]]

    with pytest.raises(errors.MissingFileError, match=r"/no/such/client\.npz.* node"):
        invoke(mean_of_totals, data)


def test_file_of_another_type_is_an_error_with_its_name(
    invoke: Invoke, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "doubles.npz"
    np.savez(path, x=np.zeros(3))

    with pytest.raises(errors.ValueMismatchError, match=r"doubles\.npz.* on node"):
        invoke(mean_of_totals, [rtf.data(str(path), NUMBERS)])


def test_one_file_is_no_value_of_many_clients(invoke: Invoke, write: FilesOf) -> None:
    with pytest.raises(TypeError, match=r"Expected.*list|float32\*"):
        invoke(totals, rtf.data(write(1)[0], NUMBERS))


def test_data_of_another_type_than_the_parameter_is_refused(invoke: Invoke) -> None:
    data = [rtf.data("a.npz", fl.SequenceType(np.int32))]

    with pytest.raises(errors.ValueMismatchError, match=r"float32\*.*int32\*"):
        invoke(totals, data)


def test_reference_alone_travels(write: FilesOf) -> None:
    paths = write(4)
    data = [rtf.data(path, NUMBERS) for path in paths]

    sent = pickle.dumps(plain_values.to_plain(data, AT_CLIENTS))

    assert len(sent) < sum(map(len, paths)) + 30 * len(paths)


@pytest.mark.ray
@pytest.mark.slow
def test_driver_opens_no_file_of_a_client(
    ray_contexts: ContextFactory, write: FilesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [rtf.data(path, NUMBERS) for path in write(4)]
    context = ray_contexts(workers=2, subrounds=2)

    def refuse(file: opening.DataFile) -> Any:
        raise AssertionError(f"the driver opened {file.uri}")

    monkeypatch.setattr(opening.DataFile, "open", refuse)

    assert context.invoke(mean_of_totals, data) == 2.5


@fl.federated_computation(AT_CLIENTS, AT_SERVER)
def both_totals(data: Any, more: Any) -> Any:
    at_clients = fl.federated_sum(fl.federated_map(total, data))
    return at_clients, fl.federated_map(total, more)


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        pytest.param("local", {}, id="local"),
        pytest.param("local", {"debug": True}, id="debug"),
        pytest.param("local", {"kernels": {"enabled": False}}, id="no kernels"),
        pytest.param("ray", {}, id="ray", marks=[pytest.mark.ray, pytest.mark.slow]),
    ],
)
def test_protocols_are_opened_where_they_are_named(
    request: pytest.FixtureRequest,
    write: FilesOf,
    backend: str,
    settings: Any,
) -> None:
    contexts: ContextFactory = request.getfixturevalue(f"{backend}_contexts")
    data = rtf.data(f"simplecache::file://{write(3)[2]}", NUMBERS)

    def invoke(**named: Any) -> Any:
        workers = 1 if named else 2  # a pool of its own, or that of other tests
        context = contexts(workers=workers, subrounds=2, **settings, **named)
        try:
            return context.invoke(both_totals, ([data, [np.float32(4)]], data))
        finally:
            context.close()

    with pytest.raises(
        errors.UnsupportedError, match=r"found `simplecache` in .*protocols"
    ):
        invoke()
    assert invoke(data={"protocols": ["simplecache"]}) == (7.0, 3.0)
