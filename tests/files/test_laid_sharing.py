"""Files without names, shared by processes."""

import json
import os
import pathlib
import subprocess
import tempfile

import pytest

import ray_fed.errors as errors
import ray_fed.files.laid_columns as laid_columns
from ray_fed.values import read_limits


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ray_fed-{os.getuid()}"


def make(content: bytes) -> list[int]:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return [os.dup(file.fileno())]


def read(files: list[int]) -> bytes:
    (file,) = files
    found = os.pread(file, 100, 0)
    os.close(file)
    return found


def test_files_of_a_process_that_is_gone_are_made_again(folder: pathlib.Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    folder.mkdir()
    for name in ("a", "b"):
        said = {"process": ended.pid, "files": [[3, 1, 1]]}
        (folder / name).write_text(json.dumps(said))

    found = laid_columns.share("a", lambda: make(b"anew"))

    assert read(found) == b"anew"
    assert [path.name for path in folder.iterdir()] == ["a"]  # "b" was swept


def test_another_file_under_the_same_number_is_not_taken() -> None:
    first = laid_columns.share("a", lambda: make(b"first"))
    (other,) = make(b"other")
    os.dup2(other, first[0])

    assert read(laid_columns.share("a", lambda: make(b"second"))) == b"second"
    os.close(first[0])
    os.close(other)


def test_waiting_ends_when_nobody_waits() -> None:
    def give_up() -> None:
        raise read_limits.AbandonedError("nobody waits")

    def nested() -> list[int]:
        with read_limits.checked(give_up):
            return laid_columns.share("a", lambda: make(b""))

    with pytest.raises(errors.ClusterError, match="nobody waits"):
        laid_columns.share("a", nested)
