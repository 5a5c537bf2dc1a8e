"""Rows of clients that are frozen while others are put, and written later."""

# pyright: reportPrivateUsage=false
# pyright: reportUnknownLambdaType=false

import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_fed.errors as errors
from ray_fed.learning.client_states import ClientRows, FrozenRows, Segments

ROW_BYTES = 16
CLIENTS = range(8)

puts = st.tuples(st.just("put"), st.lists(st.sampled_from(CLIENTS), unique=True))
steps = st.lists(
    st.one_of(puts, st.sampled_from([("freeze", []), ("write", []), ("drop", [])])),
    max_size=40,
)


def row(number: int) -> bytes:
    return number.to_bytes(ROW_BYTES, "little")


def rows_in(folder: pathlib.Path, max_rows: int = 3) -> tuple[ClientRows, Segments]:
    segments = Segments(str(folder), ROW_BYTES, removes=False)
    return ClientRows(max_rows, segments), segments


def loaded(folder: pathlib.Path, names: Any) -> dict[int, bytes]:
    rows, segments = rows_in(folder)
    segments.take_over(names)
    found = rows.read(list(CLIENTS), uses=False)
    return {c: r for c, r in zip(CLIENTS, found, strict=True) if r is not None}


@settings(deadline=None, max_examples=60)
@given(steps=steps, max_rows=st.integers(1, 9))
def test_frozen_rows_are_those_of_their_moment_whenever_they_are_written(
    tmp_path_factory: pytest.TempPathFactory, steps: Any, max_rows: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    rows, _ = rows_in(folder, max_rows)
    now: dict[int, bytes] = {}
    frozen: list[tuple[FrozenRows, dict[int, bytes]]] = []
    saved: list[tuple[tuple[str, ...], dict[int, bytes]]] = []

    for number, (step, clients) in enumerate(steps):
        if step == "put":
            new = [(client, row(100 * number + client)) for client in clients]
            rows.put(new)
            now |= dict(new)
        elif step == "freeze":
            frozen.append((rows.freeze(), dict(now)))
        elif step == "drop" and frozen:
            frozen.pop()
        elif step == "write" and frozen:
            oldest, then = frozen.pop(0)
            saved = [*saved, (oldest.write(), then)][-2:]
            rows.collect({name for names, _ in saved for name in names})
        assert rows.num_in_memory <= max_rows

    held = rows.read(list(CLIENTS), uses=True)
    assert held == [now.get(client) for client in CLIENTS]
    for names, then in saved:
        assert loaded(folder, names) == then


def test_number_of_files_is_bounded(tmp_path: pathlib.Path) -> None:
    rows, _ = rows_in(tmp_path, 10)
    names: tuple[str, ...] = ()

    for number in range(2000):
        rows.put([(number, row(number))])
        names = rows.freeze().write()
        rows.collect({*names})

    assert len(list(tmp_path.iterdir())) <= 257
    reloaded, segments = rows_in(tmp_path)
    segments.take_over(names)
    assert reloaded.read(list(range(2000)), uses=False) == list(map(row, range(2000)))


def test_segments_that_no_state_names_are_removed(tmp_path: pathlib.Path) -> None:
    lost, _ = rows_in(tmp_path)
    lost.put([(1, row(1))])
    lost.freeze().write()  # the program is killed before its state is saved
    rows, segments = rows_in(tmp_path)
    segments.take_over(())

    rows.put([(2, row(2))])
    names = rows.freeze().write()
    rows.collect({*names})

    assert [path.name for path in tmp_path.iterdir()] == list(names)


@pytest.mark.parametrize(
    "place", [0, 8, 20, -1], ids=["length", "header", "in it", "row"]
)
def test_damaged_byte_is_told(tmp_path: pathlib.Path, place: int) -> None:
    rows, _ = rows_in(tmp_path)
    rows.put([(1, row(7))])
    (name,) = rows.freeze().write()
    content = bytearray((tmp_path / name).read_bytes())
    content[place] ^= 1
    (tmp_path / name).write_bytes(content)

    with pytest.raises(errors.SavedStateError, match=name):
        loaded(tmp_path, [name])


@pytest.mark.parametrize("kept", [0, 4, 30, -1], ids=["all", "length", "header", "row"])
def test_cut_segment_is_told(tmp_path: pathlib.Path, kept: int) -> None:
    rows, _ = rows_in(tmp_path)
    rows.put([(1, row(7))])
    (name,) = rows.freeze().write()
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:kept])

    with pytest.raises(errors.SavedStateError, match=name):
        loaded(tmp_path, [name])


def test_segment_that_is_gone_is_told(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.SavedStateError, match="not there"):
        loaded(tmp_path, ["gone"])


def test_rows_are_read_by_segment_in_any_order(tmp_path: pathlib.Path) -> None:
    rows, _ = rows_in(tmp_path, 1)
    order = np.random.default_rng(0).permutation(50).tolist()
    for start in range(0, 50, 10):
        rows.put([(client, row(client)) for client in order[start : start + 10]])

    wanted = order[::-1]

    assert rows.read(wanted, uses=False) == list(map(row, wanted))


def test_row_that_moves_to_another_file_while_it_is_read_is_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = Segments(str(tmp_path), ROW_BYTES, removes=True)
    segments.write([(0, row(7)), (1, row(8))], lambda *_: True)
    read, moves = segments._files.read, [(0, row(9)), (1, row(8))]

    def move_first(*args: Any) -> Any:
        if moves:
            segments.write([moves.pop(), moves.pop()], lambda *_: True)
        return read(*args)

    monkeypatch.setattr(segments._files, "read", move_first)

    assert segments.read([0, 1]) == {0: row(9), 1: row(8)}


def test_file_that_is_gone_is_an_error(tmp_path: pathlib.Path) -> None:
    segments = Segments(str(tmp_path), ROW_BYTES, removes=True)
    name = segments.write([(0, row(7))], lambda *_: True)
    (tmp_path / name).unlink()

    with pytest.raises(errors.StorageError, match="FileNotFoundError"):
        segments.read([0])
