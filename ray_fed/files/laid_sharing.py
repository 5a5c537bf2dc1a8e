"""Files without names that the processes of one machine share: made by one of them.

    <temporary folder>/ray_fed-<user>/<name>     who has them open, and as what

A process that comes later opens them by way of `/proc`; where that is not to be, it
makes its own. The kernel frees them when the last process is gone, however it ended:
what may stay behind is a line of text, which the next process to make files removes.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import ray_fed.errors as errors
from ray_fed.values import read_limits

_POLL_S = 0.02

Opened: TypeAlias = list[int]
"""Descriptors of files, open for reading."""


def share(name: str, make: Callable[[], Opened]) -> Opened:
    """Return files of a name, made by this process if no other one has them.

    Args:
        name: of letters and digits; decides what is in the files.
        make: returns the files, which must stay open for others to come.

    Raises:
        ClusterError: nobody waits for them any more.
    """
    path = _folder() / name
    with _locked(path) as register:
        found = _open_shared(register.read())
        if found is not None:
            return found
        register.truncate(0)
        _sweep(path.parent)
        made = make()
        json.dump({"process": os.getpid(), "files": _describe(made)}, register)
        register.flush()
        return made


def forget(name: str) -> None:
    """Let no other process of this machine find the files any more."""
    (_place() / name).unlink(missing_ok=True)


def _place() -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir()) / f"ray_fed-{os.getuid()}"


def _folder() -> pathlib.Path:
    folder = _place()
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise errors.ResourceError(
            f"Expected the folder `{folder}` to be this user's, found another owner:"
            " remove it, or set TMPDIR."
        )
    return folder


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Generator[Any]:
    """Open a file that one process at a time has, for as long as it lives."""
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                read_limits.check()
                time.sleep(_POLL_S)
        file.seek(0)
        yield file


def _describe(files: Sequence[int]) -> list[list[int]]:
    found = [(file, os.fstat(file)) for file in files]
    return [[file, status.st_dev, status.st_ino] for file, status in found]


def _open_shared(register: str) -> Opened | None:
    """Return the files that a register names, where its process still has them."""
    try:
        said = json.loads(register)
    except json.JSONDecodeError:  # nobody made them, or died while it wrote
        return None
    opened: Opened = []
    try:
        for number, device, inode in said["files"]:
            file = os.open(f"/proc/{said['process']}/fd/{number}", os.O_RDONLY)
            opened.append(file)
            status = os.fstat(file)
            if (status.st_dev, status.st_ino) != (device, inode):
                raise FileNotFoundError
    except OSError:
        for file in opened:
            os.close(file)
        return None
    return opened


def _sweep(folder: pathlib.Path) -> None:
    """Remove what processes left behind that are gone."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads(path.read_text())
            if not pathlib.Path(f"/proc/{said['process']}").exists():
                path.unlink()
