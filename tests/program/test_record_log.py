"""Records are there whole and in order, on file systems that append and on others."""

import contextlib
import itertools
import pathlib
import random
import uuid
from typing import Any

import pytest
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.program import record_log
from ray_fed.program.record_log import RecordLog


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "local":
        return str(tmp_path / "run")
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files joined after some records, as they are after megabytes."""
    monkeypatch.setattr(record_log, "_TAIL_BYTES", 100)
    monkeypatch.setattr(record_log, "_MOST_ALIKE", 4)


def records_of(count: int, kind: str = "a") -> list[bytes]:
    return [f'{{"{kind}": {number}}}'.encode() for number in range(count)]


def write(place: str, records: list[bytes]) -> RecordLog:
    log = RecordLog(place, "history_")
    log.resume([])
    for record in records:
        log.append([record])
    return log


def test_records_are_read_as_they_were_appended(place: str) -> None:
    log, seen = RecordLog(place, "history_"), 0
    log.resume([])
    for count in range(1, 200):
        log.append(records_of(count)[-1:])
        found = RecordLog(place, "history_").read()
        assert found == records_of(count)
        seen = max(seen, len(log.list_names()))

    assert seen <= 12  # 199 records in files of seven


def test_resume_replaces_what_follows(place: str) -> None:
    generator = random.Random(3)
    kept: list[bytes] = []
    for kind in "abcdefgh":
        log = RecordLog(place, "history_")
        kept = log.read()[: generator.randrange(60)]
        log.resume(kept)
        more = records_of(generator.randrange(1, 60), kind)
        log.append(more[:1])
        for start in range(1, len(more), 5):
            log.append(more[start : start + 5])
        kept += more

        assert RecordLog(place, "history_").read() == kept


def test_append_that_is_undone_leaves_no_trace(place: str) -> None:
    log = write(place, records_of(30))

    log.append([b"lost"] * 3)
    log.undo()
    log.append(records_of(31)[-1:])

    assert RecordLog(place, "history_").read() == records_of(31)


def test_file_cut_anywhere_has_its_whole_records(tmp_path: pathlib.Path) -> None:
    write(str(tmp_path), records_of(4))
    path = tmp_path / "history_0.log"
    content = path.read_bytes()

    for length in range(len(content)):
        path.write_bytes(content[:length])
        log = RecordLog(tmp_path, "history_")
        found = log.read()
        assert found == records_of(content[:length].count(b"\n"))
        log.resume(found)
        log.append(records_of(4)[len(found) :])
        assert path.read_bytes() == content


def test_damaged_byte_ends_what_is_read(tmp_path: pathlib.Path) -> None:
    write(str(tmp_path), records_of(4))
    path = tmp_path / "history_0.log"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 3] ^= 1
    path.write_bytes(content)

    assert RecordLog(tmp_path, "history_").read() == records_of(2)


def test_file_that_another_program_cut_is_told(tmp_path: pathlib.Path) -> None:
    log = write(str(tmp_path), records_of(4))
    (tmp_path / "history_0.log").write_bytes(b"")

    with pytest.raises(errors.StorageError, match="another program changed it"):
        log.append([b"{}"])


class Killed(BaseException):
    """Ends a program in the midst of a change."""


class KilledFiles:
    """A file system whose program is killed after some changes."""

    def __init__(self, system: Any, num_changes: int) -> None:
        self._system, self._left = system, num_changes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._system, name)
        if name not in ("put_file", "rm_file"):
            return found

        def change(*arguments: Any) -> Any:
            if not self._left:
                raise Killed
            self._left -= 1
            return found(*arguments)

        return change


class DoomedLog(RecordLog):
    """A log whose program is killed after some changes of files."""

    @override
    def __init__(self, place: str, num_changes: int) -> None:
        super().__init__(place, "history_")
        self._system = KilledFiles(self._system, num_changes)


def test_kill_between_two_changes_loses_no_record_that_was_appended() -> None:
    for num_changes in range(60):
        place, count = f"memory://{uuid.uuid4().hex}/run", 0
        log = DoomedLog(place, num_changes)
        log.resume([])
        with contextlib.suppress(Killed):
            for count in itertools.count():
                log.append(records_of(count + 1)[-1:])

        found = RecordLog(place, "history_").read()
        assert found == records_of(count)
        after = RecordLog(place, "history_")
        after.resume(found[:-3])
        for record in records_of(40, "b"):
            after.append([record])
        assert RecordLog(place, "history_").read() == found[:-3] + records_of(40, "b")
