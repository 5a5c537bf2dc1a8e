"""Values of clients over rounds: in memory, and in a file."""

# pyright: reportPrivateUsage=false
# pyright: reportUnknownLambdaType=false

import os
import pathlib
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

import ray_fed.errors as errors
from ray_fed.learning.client_states import ClientStates

INITIAL = (np.zeros(3, np.float32), np.int32(0))
ROW = 16


def value(number: int) -> Any:
    return (np.full(3, number, np.float32), np.int32(number))


def numbers(states: ClientStates, clients: list[Any]) -> list[int]:
    found = states.take(clients)
    assert all(np.all(array == number) for array, number in found)
    return [int(number) for _, number in found]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bytes": 15}, "at least 16"),
        ({"path": "s3://bucket/states"}, "of this machine"),
    ],
)
def test_places_for_no_value_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        ClientStates(INITIAL, **options)


@pytest.mark.parametrize("rows", [1, 3, 50], ids=["one", "some", "all in memory"])
def test_values_are_those_of_a_dict_whatever_fits(
    tmp_path: pathlib.Path, rows: int
) -> None:
    generator = np.random.default_rng(0)
    expected: dict[int, int] = {}
    states = ClientStates(INITIAL, str(tmp_path), memory_bytes=rows * ROW)
    assert numbers(states, ["a", 7]) == [0, 0]
    assert len(states) == 0

    for number in range(1, 60):
        cohort = [int(c) for c in generator.choice(20, 4, replace=False)]
        assert numbers(states, cohort) == [expected.get(c, 0) for c in cohort]
        states.put(cohort, [value(number + c) for c in cohort])
        expected |= {c: number + c for c in cohort}
        assert states.memory_bytes <= rows * ROW

    assert len(states) == len(expected)
    assert numbers(states, list(expected)) == list(expected.values())


def test_file_does_not_grow_with_the_number_of_rounds(tmp_path: pathlib.Path) -> None:
    row = 4000
    states = ClientStates(
        [np.zeros(1000, np.float32)], str(tmp_path), memory_bytes=4 * row
    )

    for number in range(40):
        states.put(list(range(20)), [[np.full(1000, number, np.float32)]] * 20)

    spilled: Any = states._spilled
    assert os.fstat(spilled._file.fileno()).st_size <= 20 * row


def test_values_beyond_memory_are_checked(tmp_path: pathlib.Path) -> None:
    states = ClientStates(INITIAL, str(tmp_path), memory_bytes=ROW)
    states.put([1, 2], [value(1), value(2)])
    file: Any = states._spilled
    file._file.seek(3)
    file._file.write(b"x")

    assert numbers(states, [2]) == [2]
    with pytest.raises(errors.SavedStateError, match="of the client `1`"):
        states.take([1])


def test_folder_that_cannot_be_written_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    states = ClientStates(INITIAL, str(tmp_path / "file"), memory_bytes=ROW)

    with pytest.raises(errors.StorageError, match=r"write client states in .*file"):
        states.put([1, 2], [value(1)] * 2)


@pytest.mark.parametrize(
    ("clients", "values", "error"),
    [
        ([1, 1], [value(1)] * 2, errors.ValueMismatchError),
        ([1, 2], [value(1)], errors.CardinalityError),
        ([1], [value(1)[:1]], errors.ValueMismatchError),
        ([1], [(np.zeros(3), np.int32(0))], errors.ValueMismatchError),
    ],
    ids=["twice", "too few", "structure", "other dtype"],
)
def test_values_of_another_kind_are_refused(
    clients: list[Any], values: list[Any], error: type[Exception]
) -> None:
    states = ClientStates(INITIAL)

    with pytest.raises(error, match="Expected"):
        states.put(clients, values)
    assert len(states) == 0


def test_files_have_no_name_and_end_with_the_values(tmp_path: pathlib.Path) -> None:
    with ClientStates(INITIAL, str(tmp_path), memory_bytes=ROW) as states:
        states.put([1, 2, 3], [value(n) for n in (1, 2, 3)])

        assert numbers(states, [1, 2, 3]) == [1, 2, 3]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["{}/kept", "memory://kept-states"])
def test_saved_values_are_loaded(tmp_path: pathlib.Path, place: str) -> None:
    folder = place.format(tmp_path)
    states = ClientStates(INITIAL, str(tmp_path), memory_bytes=2 * ROW)
    for last in (3, 9):
        clients = ["a", "b", *range(last)]
        states.put(clients, [value(last)] * len(clients))
        states.save(folder)

    loaded = ClientStates.load(folder, INITIAL)

    assert set(loaded.ids) == {"a", "b", *range(9)}
    assert numbers(loaded, ["a", "b", *range(10)]) == [9] * 11 + [0]
    with pytest.raises(errors.SavedStateError, match=r"found arrays .*<i4"):
        ClientStates.load(folder, np.zeros(4, np.float32))
    with pytest.raises(errors.SavedStateError, match="found none"):
        ClientStates.load(f"{folder}/elsewhere", INITIAL)


def fail_at_the_index(_: LocalFileSystem, source: str, target: str) -> None:
    if "all_" in target:
        raise OSError("no more room")
    os.replace(source, target)  # noqa: PTH105


def test_save_that_ends_half_way_leaves_what_was_saved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = ClientStates(INITIAL)
    states.put(["a", 1], [value(1), value(1)])
    states.save(str(tmp_path))
    states.put(["a", 2], [value(2), value(2)])
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "mv", fail_at_the_index)
        with pytest.raises(errors.StorageError):
            states.save(str(tmp_path))

    loaded = ClientStates.load(str(tmp_path), INITIAL)
    assert numbers(loaded, ["a", 1, 2]) == [1, 1, 0]

    states.save(str(tmp_path))
    assert numbers(ClientStates.load(str(tmp_path), INITIAL), ["a", 1, 2]) == [2, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.zip", "all_2.zip"]


@pytest.mark.parametrize("mask", [[True, False], np.array([True]), [1.0]], ids=repr)
def test_masks_are_no_ids(mask: Any) -> None:
    states = ClientStates(INITIAL)
    states.put([0, 1], [value(0), value(1)])

    with pytest.raises(errors.ConfigError, match="of a mask, pass the ids"):
        states.take(mask)
