"""A virtual environment for each peer, with what that peer needs and nothing else."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

_PROBE = (
    "import sys, sysconfig; print('%d.%d' % sys.version_info[:2] +"
    " 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED')))"
)
_TOLD = "ray_fed_peer.json"


class EnvironmentFailure(Exception):  # noqa: N818 (a peer without one is no error)
    """A peer's environment cannot be made; the message says why."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What a peer needs.

    Attributes:
        name: of its folder.
        pythons: versions that serve, the best first; "3.14t" has no lock.
        requirements: as pip reads them.
        alone: those that are installed without their own requirements.
    """

    name: str
    pythons: tuple[str, ...]
    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()


def last_line(text: str) -> str:
    """Return the last line of what a command said that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def prepare(
    environment: Environment, cache: pathlib.Path, given: Sequence[str]
) -> pathlib.Path:
    """Return the Python of an environment, which is made if it is not there.

    Args:
        environment: of a peer.
        cache: has a folder for each peer's.
        given: interpreters to try first.

    Raises:
        EnvironmentFailure: no interpreter serves, or something does not install.
    """
    folder = cache / environment.name
    python, told = folder / "bin" / "python", folder / _TOLD
    wanted = json.dumps(dataclasses.asdict(environment), sort_keys=True)
    if told.is_file() and told.read_text() == wanted:
        return python
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise EnvironmentFailure(
            f"Expected `{folder}` to be an environment or not there, found something"
            " else: choose another --cache."
        )
    base = find_python(environment.pythons, given)
    _run([base, "-m", "venv", "--clear", str(folder)])
    _install(python, environment.requirements)
    if environment.alone:
        _install(python, ["--no-deps", *environment.alone])
    told.write_text(wanted)
    return python


def find_python(versions: Sequence[str], given: Sequence[str]) -> str:
    """Return an interpreter of the first of these versions that there is.

    Raises:
        EnvironmentFailure: there is none.
    """
    for version in versions:
        for candidate in _candidates(version, given):
            if _version_of(candidate) == version:
                return candidate
    raise EnvironmentFailure(
        f"Expected an interpreter of Python {' or '.join(versions)}, found none: name"
        " one with --python."
    )


def _candidates(version: str, given: Sequence[str]) -> Iterator[str]:
    yield from given
    yield sys.executable
    if (found := shutil.which(f"python{version}")) is not None:
        yield found
    root = os.environ.get("PYENV_ROOT")
    pyenv = pathlib.Path(root) if root else pathlib.Path.home() / ".pyenv"
    number = version.removesuffix("t")
    for folder in sorted((pyenv / "versions").glob(f"{number}.*")):
        yield str(folder / "bin" / "python")


def _version_of(python: str) -> str | None:
    try:
        ran = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def _install(python: pathlib.Path, arguments: Sequence[str]) -> None:
    """Install by uv, or by pip where there is no uv or it fails."""
    uv = shutil.which("uv")
    if uv is not None:
        command = [uv, "pip", "install", "--quiet", "--python", str(python)]
        ran = subprocess.run([*command, *arguments], capture_output=True, check=False)
        if ran.returncode == 0:
            return
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    _run([*pip, "--quiet", *arguments])


def _run(command: Sequence[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise EnvironmentFailure(last_line(ran.stderr or ran.stdout))
