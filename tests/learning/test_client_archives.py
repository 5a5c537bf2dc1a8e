"""What clients keep, saved: archives of rows that changed, whenever they come."""

import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_fed.errors as errors
import ray_fed.learning.client_states as client_states
from ray_fed.learning.client_states import ClientArchives, SavedClientStates

ROW_BYTES = 8
CLIENTS = range(8)
INITIAL = np.zeros(1, np.int64)

puts = st.tuples(st.just("put"), st.lists(st.sampled_from(CLIENTS), unique=True))
steps = st.lists(
    st.one_of(puts, st.sampled_from([("save", []), ("resume", [])])), max_size=40
)


def states_in(folder: pathlib.Path, max_rows: int = 3) -> SavedClientStates:
    return SavedClientStates(INITIAL, str(folder), memory_bytes=max_rows * ROW_BYTES)


def loaded(folder: pathlib.Path, numbers: Any) -> list[int]:
    states = states_in(folder)
    states.read_archives(numbers)
    return [int(value[0]) for value in states.take(CLIENTS)]


@settings(deadline=None, max_examples=60)
@given(steps=steps, max_rows=st.integers(1, 9))
def test_saved_values_are_those_of_their_moment(
    tmp_path_factory: pytest.TempPathFactory, steps: Any, max_rows: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    states = states_in(folder, max_rows)
    states.read_archives([])
    now = dict.fromkeys(CLIENTS, 0)
    saved: list[tuple[list[int], dict[int, int]]] = [([], dict(now))]

    for number, (step, clients) in enumerate(steps, 1):
        if step == "put":
            new = {client: 100 * number + client for client in clients}
            states.put(clients, [np.array([value]) for value in new.values()])
            now |= new
        elif step == "save":
            states.add_unsaved(states.take_changed())
            saved = [*saved, (states.write_archives(), dict(now))][-2:]
            states.collect({number for numbers, _ in saved for number in numbers})
        else:
            numbers, then = saved[-1]
            states = states_in(folder, max_rows)
            states.read_archives(numbers)
            now = dict(then)
        assert states.memory_bytes <= max_rows * ROW_BYTES

    assert [int(v[0]) for v in states.take(CLIENTS)] == list(now.values())
    for numbers, then in saved:
        assert loaded(folder, numbers) == list(then.values())


def row(number: int) -> bytes:
    return number.to_bytes(ROW_BYTES, "little")


def test_number_of_archives_is_bounded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_states, "_MOST_ARCHIVES", 16)
    archives = ClientArchives(str(tmp_path), ROW_BYTES)
    numbers: list[int] = []

    for client in range(100):
        numbers = archives.save({client: row(client)})
        archives.collect({*numbers})

    assert len(list(tmp_path.iterdir())) == len(numbers) <= 17
    found: dict[Any, bytes] = {}
    for rows in ClientArchives(str(tmp_path), ROW_BYTES).load(numbers):
        found |= rows
    assert found == {client: row(client) for client in range(100)}


def test_archives_do_not_grow_with_the_number_of_rounds(tmp_path: pathlib.Path) -> None:
    archives = ClientArchives(str(tmp_path), 4000)
    generator = np.random.default_rng(0)

    for number in range(60):
        cohort = generator.choice(50, 5, replace=False).tolist()
        numbers = archives.save(dict.fromkeys(cohort, bytes([number]) * 4000))
        archives.collect({*numbers})

    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert written <= 2.2 * 50 * 4000  # and what each archive says of itself


def test_what_a_save_that_failed_held_is_in_the_next_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = states_in(tmp_path)
    states.put([1], [np.array([7])])
    states.add_unsaved(states.take_changed())
    (tmp_path / "clients").write_text("in the way")
    with pytest.raises(errors.StorageError, match="Expected a folder"):
        states.write_archives()
    (tmp_path / "clients").unlink()

    states.put([2], [np.array([8])])
    states.add_unsaved(states.take_changed())

    assert loaded(tmp_path, states.write_archives())[:3] == [0, 7, 8]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone", "other rows"])
def test_damaged_archive_is_told(tmp_path: pathlib.Path, damage: str) -> None:
    archives = ClientArchives(str(tmp_path / "clients"), ROW_BYTES)
    (number,) = archives.save({client: row(client) for client in range(200)})
    path = tmp_path / "clients" / f"{number}.zip"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    if damage in ("cut", "empty"):
        del content[len(content) // 2 if damage == "cut" else 0 :]
    path.write_bytes(content)
    if damage == "gone":
        path.unlink()
    if damage == "other rows":
        path.unlink()
        archives = ClientArchives(str(tmp_path / "clients"), 5)
        archives.save({1: b"abcde"})

    with pytest.raises(errors.SavedStateError, match=path.name):
        loaded(tmp_path, [number])
