"""State on file systems without a rename: whole or not there, wherever it was cut."""

import asyncio
import itertools
import logging
import os
import pathlib
import subprocess
import sys
import uuid
from typing import Any

import fsspec
import numpy as np
import pytest
import s3fs

import ray_fed.errors as errors
from ray_fed.program import ClientData, FileProgramStateManager

CONTENT = {"model": np.linspace(0, 1, 300, dtype=np.float32), "text": "abc", "n": 3}


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


@pytest.fixture(params=["memory", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "local":
        return str(tmp_path)
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        return f"s3://bucket/runs/{uuid.uuid4().hex}"
    return f"memory://runs/{uuid.uuid4().hex}"


def names(uri: str) -> list[str]:
    files, root = fsspec.url_to_fs(uri)
    files.invalidate_cache()
    return sorted(path.rpartition("/")[2] for path in files.ls(root, detail=False))


def test_last_versions_are_kept_and_come_back(uri: str) -> None:
    manager = FileProgramStateManager(uri, keep_total=2)
    assert run(manager.load_latest(CONTENT)) == (None, 0)

    for version in (1, 2, 5):
        run(manager.save({**CONTENT, "n": version}, version))
    state, version = run(FileProgramStateManager(uri).load_latest(CONTENT))

    assert run(manager.get_versions()) == [2, 5]
    assert version == state["n"] == 5
    np.testing.assert_array_equal(state["model"], CONTENT["model"])
    assert names(uri) == ["program_state_2.zip", "program_state_5.zip"]
    run(manager.remove_all())
    assert run(manager.get_versions()) is None


class KilledError(BaseException):
    pass


class KilledFiles:
    """A file system whose program is killed before its nth change."""

    def __init__(self, files: Any, num_changes: int) -> None:
        self._files = files
        self._left = num_changes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if name not in ("open", "put_file", "mv", "rm_file"):
            return found

        def change(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and args[1] == "rb":
                return found(*args, **kwargs)
            if not self._left:
                raise KilledError
            self._left -= 1
            return found(*args, **kwargs)

        return change


@pytest.mark.parametrize(
    ("uri", "changes"),
    [
        pytest.param("memory", ["put_file", "rm_file"], id="memory"),
        pytest.param("s3", ["put_file", "rm_file"], id="s3", marks=pytest.mark.slow),
        pytest.param("local", ["open", "mv", "rm_file"], id="local"),
    ],
    indirect=["uri"],
)
def test_kill_between_any_two_changes_leaves_a_whole_version(
    uri: str, changes: list[str]
) -> None:
    written = next(i for i, name in enumerate(changes) if name in ("put_file", "mv"))
    killed = 0
    for num_changes in itertools.count():
        place = f"{uri}/{num_changes}"
        manager = FileProgramStateManager(place, keep_total=2)
        for version in (1, 2):
            run(manager.save({**CONTENT, "n": version}, version))
        doomed: Any = FileProgramStateManager(place, keep_total=2)
        doomed._versions._system = KilledFiles(doomed._versions._system, num_changes)
        try:
            run(doomed.save({**CONTENT, "n": 3}, 3))
        except KilledError:
            killed += 1
        else:
            break

        state, version = run(manager.load_latest(CONTENT))
        assert version == state["n"] == (3 if num_changes > written else 2)
        run(manager.save({**CONTENT, "n": 4}, 4))
        assert run(manager.get_versions())[-1] == 4
        assert len(names(place)) == 2  # nothing is left behind

    assert killed == len(changes)


def test_version_cut_at_any_hundredth_byte_is_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    uri = f"memory://cut/{uuid.uuid4().hex}"
    manager = FileProgramStateManager(uri)
    run(manager.save({**CONTENT, "n": 1}, 1))
    run(manager.save(CONTENT, 2))
    files, root = fsspec.url_to_fs(uri)
    whole = files.cat_file(f"{root}/program_state_2.zip")

    for length in range(0, len(whole), 100):
        files.pipe_file(f"{root}/program_state_2.zip", whole[:length])
        with caplog.at_level(logging.CRITICAL):
            state, version = run(manager.load_latest(CONTENT))
        assert (version, state["n"]) == (1, 1)

    run(manager.save(CONTENT, 2))  # a damaged one may be written anew
    assert run(manager.load_latest(CONTENT))[1] == 2


def test_bucket_that_is_not_there_is_told(s3_server: str) -> None:
    manager = FileProgramStateManager("s3://no-such-bucket/runs")

    with pytest.raises(errors.StorageError, match=r"s3://no-such-bucket/runs/program"):
        run(manager.save(CONTENT, 1))


def test_lacking_credentials_are_told_and_where_they_come_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for variable in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()

    uri, found = "s3://bucket/runs", r"`s3://bucket/runs`.*such as AWS_ACCESS_KEY_ID"
    with pytest.raises(errors.StorageError, match=found):
        run(FileProgramStateManager(uri).get_versions())
    with pytest.raises(errors.MissingFileError, match=found):
        ClientData.from_parquet(uri, client="c", x="x")


class Refusing:
    """A file system that lists files, and does not let them be read."""

    def __init__(self, files: Any, error: Exception) -> None:
        self._files = files
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, *_: Any) -> bytes:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [PermissionError("Forbidden"), TimeoutError("late"), OSError("reset by peer")],
    ids=["right", "time", "connection"],
)
def test_version_that_cannot_be_read_now_is_not_passed_over(error: Exception) -> None:
    manager: Any = FileProgramStateManager(f"memory://refused/{uuid.uuid4().hex}")
    run(manager.save(CONTENT, 1))
    run(manager.save(CONTENT, 2))
    manager._versions._system = Refusing(manager._versions._system, error)

    uses = [manager.load(2, CONTENT), manager.load_latest(CONTENT)]
    for use in (*uses, manager.save(CONTENT, 2)):
        with pytest.raises(errors.StorageError, match=f"program_state_2.*{error}"):
            run(use)


HANGING_PROGRAM = """
import asyncio, contextlib, fsspec, time
from fsspec.implementations.memory import MemoryFileSystem
from ray_fed.program import FileProgramStateManager

class Hanging(MemoryFileSystem):
    protocol = "hanging"

    def ls(self, *args, **kwargs):
        time.sleep(600)

fsspec.register_implementation("hanging", Hanging)
manager = FileProgramStateManager("hanging://a/b")
with contextlib.suppress(TimeoutError):
    asyncio.run(asyncio.wait_for(manager.load_latest(None), 0.1))
"""


def test_program_ends_while_its_storage_hangs() -> None:
    command = [sys.executable, "-c", HANGING_PROGRAM]

    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_uri_that_fsspec_does_not_know_is_refused() -> None:
    with pytest.raises(errors.UnsupportedError, match="fsspec knows"):
        FileProgramStateManager("nosuch://a/b")


@pytest.mark.parametrize("content", [None, b"no archive"], ids=["none", "other"])
def test_archive_that_cannot_be_opened_is_told(
    tmp_path: pathlib.Path, content: bytes | None
) -> None:
    path = tmp_path / "a.zip"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(
        errors.StorageError, match=r"Expected to open `zip://x::.*a\.zip"
    ):
        FileProgramStateManager(f"zip://x::{path}")


def test_full_disk_is_told_and_costs_no_version(small_disk: pathlib.Path) -> None:
    manager = FileProgramStateManager(small_disk)
    run(manager.save({"model": np.zeros(1000)}, 1))

    with pytest.raises(errors.StorageError, match="No space left"):
        run(manager.save({"model": np.zeros(10_000)}, 2))

    state, version = run(manager.load_latest({"model": 0}))
    assert version == 1
    assert state["model"].shape == (1000,)
