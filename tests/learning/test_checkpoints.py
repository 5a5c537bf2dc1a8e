"""What is saved beside the rounds: the latest state, one save at a time."""

import contextlib
import pathlib
import threading
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning import History, RoundRecord
from ray_fed.learning.checkpoints import Checkpoints, Reached, RunStorage
from ray_fed.learning.client_states import SavedClientStates

RECORDS = History(
    RoundRecord(index, (0,), {"loss": 1.0}, None, 0.5) for index in range(9)
)


class GatedStorage(RunStorage):
    """Notes what it is to save; each save waits until the gate is open."""

    def __init__(
        self, path: pathlib.Path, clients: SavedClientStates | None = None
    ) -> None:
        super().__init__(path, None, clients)
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.failures: list[Exception] = []
        self.saved: list[Any] = []

    @override
    def save(self, reached: Reached) -> None:
        self.begun.set()
        self.gate.wait(10)
        if self.failures:
            raise self.failures.pop()
        self.saved.append(reached.state)


def no_limit() -> None:
    """Return for how long a save may take."""


def fetch(state: Any) -> Any:
    return f"read {state}"


@pytest.fixture
def storage(tmp_path: pathlib.Path) -> GatedStorage:
    return GatedStorage(tmp_path)


def test_states_that_wait_give_way_to_the_latest(
    storage: GatedStorage,
) -> None:
    saver = Checkpoints(storage, fetch, spacing_s=0.0)

    saver.add(Reached("a", RECORDS[:1]))
    storage.begun.wait(10)
    saver.add(Reached("b", RECORDS[:2]))
    saver.add(Reached("c", RECORDS[:3]))
    storage.gate.set()
    saver.finish(Reached("d", RECORDS[:4]), no_limit)

    assert storage.saved[0] == "read a"
    assert storage.saved[-1] == "read d"
    assert "read b" not in storage.saved


def test_what_clients_keep_is_saved_with_the_state_that_takes_the_place(
    tmp_path: pathlib.Path,
) -> None:
    initial = np.zeros(1)
    clients = SavedClientStates(initial, str(tmp_path), memory_bytes=2**20)
    storage = GatedStorage(tmp_path, clients)
    storage.failures.append(errors.StorageError("no room"))
    saver = Checkpoints(storage, fetch, spacing_s=0.0)

    for count in range(1, 4):  # the first fails, the second gives way
        clients.put([count], [np.full(1, float(count))])
        saver.add(Reached("a", RECORDS[:count], clients.take_changed()))
        storage.begun.wait(10)
    storage.gate.set()
    with contextlib.suppress(errors.StorageError):
        saver.finish(Reached("b", RECORDS[:3]), no_limit)
    loaded = SavedClientStates(initial, str(tmp_path), memory_bytes=2**20)
    loaded.read_archives(clients.write_archives())

    assert loaded.take([1, 2, 3]) == [[1.0], [2.0], [3.0]]


def test_failure_is_raised_by_the_next_state_or_at_the_end(
    storage: GatedStorage,
) -> None:
    storage.gate.set()
    first = Reached("a", RECORDS[:1])
    last, each = (Checkpoints(storage, fetch, spacing_s=s) for s in (0.0, None))

    def add_all() -> None:
        for count in range(1, 9):
            each.add(Reached(count, RECORDS[:count]))

    for fail in (lambda: last.finish(first, no_limit), add_all):
        storage.failures.append(errors.StorageError("no room"))
        with pytest.raises(errors.StorageError, match="no room"):
            fail()


def test_last_state_that_takes_too_long_is_told(
    storage: GatedStorage, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Checkpoints(storage, fetch, spacing_s=0.0)

    saver.finish(Reached("a", RECORDS[:1]), lambda: 0.0)

    assert "state after 1 rounds was not saved in time" in caplog.text
    storage.gate.set()


def test_nothing_is_read_to_be_saved_without_a_place() -> None:
    read: list[Any] = []

    def note(state: Any) -> Any:
        read.append(state)

    saver = Checkpoints(None, note, spacing_s=None)

    saver.add(Reached("a", RECORDS[:1]))
    saver.finish(Reached("b", RECORDS[:2]), no_limit)

    assert read == []
