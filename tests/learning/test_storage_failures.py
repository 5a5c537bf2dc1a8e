"""Storage that fails: before the first round where that can be known, and later."""

import errno
import pathlib
import shutil
import subprocess
from typing import Any, NamedTuple

import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.files import opening
from ray_fed.learning import LearningProcess, RoundRecord, run

CLIENTS = [[1.0], [2.0]]


class Grown(NamedTuple):
    """A state that is as large as its round says."""

    round_index: int
    weights: Any


def growing(grows_at: int = 99, size: int = 0) -> LearningProcess:
    """Return a process whose state is f64[size], not f64[8], from some round on."""

    def advance(state: Grown, _: Any) -> tuple[Grown, dict[str, float]]:
        count = state.round_index + 1
        now = np.full(size if count >= grows_at else 8, float(count))
        return Grown(count, now), {"loss": 1.0 / count}

    return LearningProcess(lambda: Grown(0, np.zeros(8)), advance)


def fails_before_the_first_round(place: Any) -> errors.StorageError:
    def advance(*_: Any) -> Any:
        pytest.fail("a round ran")

    process = LearningProcess(growing().initialize, advance)
    with pytest.raises(errors.StorageError) as caught:
        run(process, CLIENTS, num_rounds=5, storage_path=place)
    return caught.value


@pytest.fixture
def read_only(small_disk: pathlib.Path) -> pathlib.Path:
    mount = shutil.which("mount") or "mount"
    subprocess.run([mount, "-o", "remount,ro", str(small_disk)], check=True)
    return small_disk


def test_place_that_may_not_be_written_is_told(read_only: pathlib.Path) -> None:
    error = fails_before_the_first_round(read_only / "run")

    assert "Read-only file system" in str(error)


def test_file_in_place_of_the_folder_is_told(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")

    assert "file" in str(fails_before_the_first_round(tmp_path / "file"))


def test_disk_that_is_full_is_told(small_disk: pathlib.Path) -> None:
    (small_disk / "others").write_bytes(b"x" * 2**16)

    assert "No space left" in str(fails_before_the_first_round(small_disk / "run"))


@pytest.mark.parametrize("name", ["round_4.zip", "run_0.zip"])
def test_file_that_may_not_be_read_is_told_and_stays(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run(growing(), CLIENTS, num_rounds=4, storage_path=tmp_path)
    open_regular = opening.open_regular

    def refuse(path: pathlib.Path) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_regular(path)

    monkeypatch.setattr(opening, "open_regular", refuse)
    error = fails_before_the_first_round(tmp_path)

    assert name in str(error)
    assert "Permission denied" in str(error)
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("checkpoint_every", [None, 1], ids=["some", "each"])
def test_disk_that_becomes_full_ends_the_run_and_keeps_what_was_saved(
    small_disk: pathlib.Path, checkpoint_every: int | None
) -> None:
    place = small_disk / "run"
    run(growing(), CLIENTS, num_rounds=2, storage_path=place)

    with pytest.raises(errors.StorageError, match="No space left"):
        run(
            growing(grows_at=4, size=100_000),
            CLIENTS,
            num_rounds=200,
            storage_path=place,
            checkpoint_every=checkpoint_every,
        )
    resumed = run(growing(), CLIENTS, num_rounds=5, storage_path=place)

    assert resumed.state.round_index == 5
    assert len(resumed.history) == 5
    np.testing.assert_array_equal(resumed.state.weights, np.full(8, 5.0))


class Remove:
    """Removes a folder after the first round."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def on_round(self, record: RoundRecord) -> None:
        if record.round_index == 0:
            shutil.rmtree(self._folder)


def test_folder_that_is_removed_in_a_run_is_made_anew(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "run"
    arguments: dict[str, Any] = {"storage_path": place, "checkpoint_every": 9}

    run(growing(), CLIENTS, num_rounds=3, callbacks=[Remove(place)], **arguments)
    resumed = run(growing(), CLIENTS, num_rounds=5, **arguments)

    assert [record.round_index for record in resumed.history] == list(range(5))
    assert resumed.state.round_index == 5


def test_folder_that_is_removed_with_what_clients_keep_is_told(
    tmp_path: pathlib.Path,
) -> None:
    place = tmp_path / "run"

    def advance(state: int, kept: Any, _: Any) -> Any:
        return state + 1, kept, {"loss": 1.0}

    process = LearningProcess(lambda: 0, advance, initial_client_state=np.zeros(2))
    with pytest.raises(errors.StorageError, match="found them removed"):
        run(
            process,
            CLIENTS,
            num_rounds=3,
            storage_path=place,
            checkpoint_every=9,
            callbacks=[Remove(place)],
        )
