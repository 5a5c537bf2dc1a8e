"""Values of clients over rounds: in memory, in files, saved and loaded."""

# pyright: reportPrivateUsage=false
# pyright: reportUnknownLambdaType=false

import pathlib
from typing import Any

import numpy as np
import pytest

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


def test_client_that_put_nothing_has_the_initial_value() -> None:
    states = ClientStates(INITIAL)

    assert numbers(states, ["a", 7]) == [0, 0]
    assert len(states) == 0


@pytest.mark.parametrize("rows", [1, 3, 50], ids=["one", "some", "all in memory"])
def test_values_are_those_of_a_dict_whatever_fits(
    tmp_path: pathlib.Path, rows: int
) -> None:
    generator = np.random.default_rng(0)
    expected: dict[int, int] = {}
    states = ClientStates(INITIAL, str(tmp_path), memory_bytes=rows * ROW)

    for number in range(1, 60):
        cohort = [int(c) for c in generator.choice(20, 4, replace=False)]
        assert numbers(states, cohort) == [expected.get(c, 0) for c in cohort]
        states.put(cohort, [value(number + c) for c in cohort])
        expected |= {c: number + c for c in cohort}
        assert states.memory_bytes <= rows * ROW

    assert len(states) == len(expected)
    assert numbers(states, list(expected)) == list(expected.values())


def test_files_do_not_grow_with_the_number_of_rounds(tmp_path: pathlib.Path) -> None:
    row = 4000
    states = ClientStates(
        [np.zeros(1000, np.float32)], str(tmp_path), memory_bytes=4 * row
    )

    for number in range(40):
        states.put(list(range(20)), [[np.full(1000, number, np.float32)]] * 20)

    written = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    assert written <= 2.2 * 20 * row  # and the files' headers


def test_saved_values_are_loaded_with_other_memory(tmp_path: pathlib.Path) -> None:
    saved = str(tmp_path / "saved" / "states")
    states = ClientStates(INITIAL, str(tmp_path / "one"), memory_bytes=2 * ROW)
    states.put(["a", "b", 3, 4, 5], [value(n) for n in range(1, 6)])

    states.save(saved)
    states.put(["a"], [value(9)])
    loaded = ClientStates.load(
        saved, INITIAL, str(tmp_path / "two"), memory_bytes=3 * ROW
    )

    assert numbers(loaded, ["a", "b", 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 0]
    assert [f.name for f in (tmp_path / "saved").iterdir()] == ["states"]


@pytest.mark.parametrize("kept", [0.9, 0.1], ids=["cut in a value", "cut in front"])
def test_damaged_file_is_refused(tmp_path: pathlib.Path, kept: float) -> None:
    saved = tmp_path / "states"
    states = ClientStates(INITIAL)
    states.put([1, 2, 3], [value(1)] * 3)
    states.save(str(saved))
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * kept)])

    with pytest.raises(errors.SavedStateError, match="states"):
        ClientStates.load(str(saved), INITIAL)


def test_changed_byte_is_found(tmp_path: pathlib.Path) -> None:
    saved = tmp_path / "states"
    states = ClientStates(INITIAL)
    states.put([1, 2, 3], [value(n) for n in range(3)])
    states.save(str(saved))
    content = bytearray(saved.read_bytes())
    content[-ROW] ^= 1
    saved.write_bytes(content)

    with pytest.raises(errors.SavedStateError, match="another checksum"):
        ClientStates.load(str(saved), INITIAL)


def test_place_that_cannot_be_written_or_read_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(errors.StorageError, match=r"write client states in .*file/x"):
        ClientStates(INITIAL).save(str(tmp_path / "file" / "x"))
    with pytest.raises(errors.StorageError, match=r"read client states in .*missing"):
        ClientStates.load(str(tmp_path / "missing"), INITIAL)


def test_failed_save_leaves_the_former_file_and_no_other(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "states"
    states = ClientStates(INITIAL)
    states.put([1], [value(1)])
    states.save(str(saved))
    monkeypatch.setattr(states._rows, "read", lambda *_, **__: [None, "no bytes"])

    with pytest.raises(errors.StorageError):
        states.save(str(saved))

    assert [file.name for file in tmp_path.iterdir()] == ["states"]
    assert numbers(ClientStates.load(str(saved), INITIAL), [1]) == [1]


def test_file_of_other_values_is_refused(tmp_path: pathlib.Path) -> None:
    ClientStates(INITIAL).save(str(tmp_path / "states"))

    with pytest.raises(errors.SavedStateError, match="types"):
        ClientStates.load(str(tmp_path / "states"), (np.zeros(4, np.float32),))


@pytest.mark.parametrize(
    ("clients", "values", "error"),
    [
        pytest.param([1, 1], [value(1)] * 2, errors.ValueMismatchError, id="twice"),
        pytest.param([1, 2], [value(1)], errors.CardinalityError, id="too few"),
        pytest.param([1], [value(1)[:1]], errors.ValueMismatchError, id="structure"),
        pytest.param(
            [1],
            [(np.zeros(3), np.int32(0))],
            errors.ValueMismatchError,
            id="other dtype",
        ),
    ],
)
def test_values_of_another_kind_are_refused(
    clients: list[Any], values: list[Any], error: type[Exception]
) -> None:
    states = ClientStates(INITIAL)

    with pytest.raises(error, match="Expected"):
        states.put(clients, values)
    assert len(states) == 0


def test_memory_for_no_value_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="at least 16"):
        ClientStates(INITIAL, memory_bytes=15)


def test_close_removes_files(tmp_path: pathlib.Path) -> None:
    with ClientStates(INITIAL, str(tmp_path), memory_bytes=ROW) as states:
        states.put([1, 2, 3], [value(1)] * 3)
        assert list(tmp_path.iterdir())

    assert list(tmp_path.iterdir()) == []
