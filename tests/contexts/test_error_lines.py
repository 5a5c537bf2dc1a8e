"""Errors that a user meets on the first day are under two screens, and say where."""

import linecache
import pathlib
import traceback
from typing import Any

import federated_language as fl
import pytest
from IPython.core.ultratb import FormattedTB

from tests.contexts import error_programs

MAX_LINES = 39
"""Of a screen of a notebook, and more than one of a terminal."""


def raised_by(name: str, folder: pathlib.Path) -> BaseException:
    """Return what a program raises, as it leaves the program."""
    file = str(folder / f"{name}.py")
    text = error_programs.BEGINNING + error_programs.PROGRAMS[name]
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    code = compile(text, file, "exec")
    with pytest.raises(Exception, match=r".") as caught:
        exec(code, {"__name__": "__main__"})
    error = caught.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)  # without this function


def script_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def notebook_of(error: BaseException) -> str:
    shown = FormattedTB("Context", theme_name="nocolor")
    return str(shown.text(type(error), error, error.__traceback__))


def check(name: str, last: list[str], folder: pathlib.Path) -> None:
    error = raised_by(name, folder)

    script, notebook = script_of(error), notebook_of(error)
    for text in (script, notebook):
        assert len(text.splitlines()) <= MAX_LINES, text
        assert "site-packages" not in text
        assert "/ray_fed/" not in text
        assert "no frame of your code" not in text
        for part in last:
            assert part in text


LAST: dict[str, list[str]] = {
    "a cell that is NaN": ["Expected a finite update", "'south'", "lower the learning"],
    "a loader": ["no folder for south", "'south'", "in `load_client`"],
    "a Python function": ["cannot parse 3.0", "position 2", "in `parse`"],
    "a layer": [
        "`client` raised",
        "below zero",
        "in `call`",
        "scaled",
        "`data[",
    ],
    "another shape": ["`x` of batch 0", "position 2", "(8, 3)", "reshape it"],
    "another dtype": ["`x` of batch 0", "position 2", "complex64", "convert it first"],
    "an evaluation": ["KeyError: 'accuracy'", 'scores["accuracy"]', "round 1"],
    "a metric": ["`closeness`", "choose another metric"],
    "an unknown column": ["`dosis`", "Did you mean `dose`?"],
}
ON_RAY = ["a loader", "a layer"]
QUICK = ["a cell that is NaN", *ON_RAY, "an unknown column"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in LAST],
)
def test_an_error_is_short(
    name: str, local_contexts: Any, tmp_path: pathlib.Path
) -> None:
    with fl.framework.get_context_stack().install(local_contexts(workers=2)):
        check(name, LAST[name], tmp_path)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", ON_RAY)
def test_an_error_on_ray_is_short(
    name: str, ray_contexts: Any, tmp_path: pathlib.Path
) -> None:
    with fl.framework.get_context_stack().install(ray_contexts(workers=2)):
        check(name, LAST[name], tmp_path)
