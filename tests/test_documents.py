"""README and docs/: their code runs, their links lead somewhere, nothing is missing.

The Python blocks of a page run in order, in one namespace. So do the new lines of a
table of old and new lines, which are the code in its right column. A call of `print` on
a line of its own has what it prints as a comment; `...` in it stands for any text.
"""

import dataclasses
import json
import linecache
import pathlib
import re
import textwrap
import tomllib
import typing
from collections.abc import Iterator
from typing import Any

import federated_language as fl
import pydantic
import pytest
import typer.testing
import yaml

import ray_fed
from ray_fed import cli, errors, framework
from ray_fed.observability import events

_ROOT = pathlib.Path(__file__).parents[1]
_FENCE = re.compile(r"^ *(```)(\w*)$")
_OLD_AND_NEW = re.compile(r"^\| TensorFlow Federated\b.* \| ray_fed\b.* \|$")
_CODE = re.compile(r"`([^`]+)`")
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"ray-fed ((?:demo|doctor|status|config|--help)\b[^`\n#&|]*)")
_FILE = re.compile(r"\b((?:examples|benchmarks|tests|ray_fed)/[\w/.]+\w)")
_QUOTED_PATH = re.compile(r"`([\w/]+(?:/|\.(?:py|md|toml)))`")
_DEFINED_IN = re.compile(r"`([\w.]+)`\s+in\s+`([\w/]+\.py)`")
_MODULE = re.compile(r"python -m ((?:benchmarks|tests)\.[\w.]+)")
_NUMBER = re.compile(r"\d[\d,.]*\d")
_PRINT = re.compile(r"^ *print\(.+\)  # (.+)$", re.MULTILINE)
_ROW = re.compile(r"^\| `([\w.]+)` \| `([^`]+)` \| ([^|]*) \| `(\w+)` \| ([^|]*) \|$")

NOT_RUN: dict[str, str] = {}
"""Each block that no test runs, by its page, with the reason that the page gives."""

_MODELS_SAVED = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",
    r"ignore:\s*Warning. tf.lite.Interpreter is deprecated:UserWarning",
)

ON_RAY = ("README.md",)
"""Pages whose code runs on a real Ray."""

SLOW = (
    "docs/devices.md",
    "docs/evaluation.md",
    "docs/export.md",
    "docs/from-ray-train.md",
    "docs/from-tff.md",
    "docs/runs.md",
    "docs/sweeps.md",
    "docs/training.md",
    "docs/write-an-algorithm.md",
)
"""Pages whose code takes more than five seconds."""


@dataclasses.dataclass(frozen=True)
class Page:
    """A Markdown file of the project."""

    path: pathlib.Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(_ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Block:
    """Code of a page.

    Attributes:
        page: its name.
        line: the number of its first line.
        text: without indentation.
        not_run: why no test runs it; None where one does.
    """

    page: str
    line: int
    text: str
    not_run: str | None

    def run(self, namespace: dict[str, Any]) -> None:
        """Run the code under its page's name, so that tracebacks show its lines."""
        name = f"<{self.page}, line {self.line}>"
        lines = self.text.splitlines(keepends=True)
        linecache.cache[name] = (len(self.text), None, lines, name)  # for autograph
        exec(compile(self.text, name, "exec"), namespace)


def _find_pages() -> list[Page]:
    return [Page(_ROOT / "README.md"), *map(Page, sorted(_ROOT.glob("docs/*.md")))]


def _python_blocks(page: Page) -> Iterator[Block]:
    lines = page.text.splitlines()
    start: int | None = None
    is_new = False
    for index, line in enumerate(lines):
        is_new = _OLD_AND_NEW.match(line) is not None or (is_new and line[:1] == "|")
        code = _CODE.findall(line.split(" | ")[-1]) if is_new else []
        if code:
            yield Block(page.name, index + 1, "\n".join([*code, ""]), None)
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if start is not None:
            text = textwrap.dedent("\n".join([*lines[start:index], ""]))
            above = _NOT_RUN.search(lines[start - 2])
            if lines[start - 1].strip() == "```python":
                yield Block(page.name, start + 1, text, above and above[1])
            start = None
        else:
            start = index + 1


_REPORTED = {*ray_fed.RoundReport.model_fields, *dir(ray_fed.RoundReport)}

PAGES = _find_pages()
CODE = [page for page in PAGES if any(_python_blocks(page))]


def _names_of_errors() -> list[str]:
    """Return the errors that a caller may see and that stand for one kind each."""
    bases = {errors.RayFedError, errors.UserError, errors.ClusterError}
    found = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.RayFedError)
    }
    hidden = bases | {errors.LocatedError}
    return sorted(kind.__name__ for kind in found - hidden)


def _anchors(page: Page) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def _matches(printed: str, promised: str) -> bool:
    pattern = ".*".join(map(re.escape, promised.split("...")))
    return re.fullmatch(pattern, printed) is not None


@pytest.fixture
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Run in an empty folder, without settings from outside but a small pool."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_FED_WORKERS", "1")
    monkeypatch.setenv("RAY_FED_PROGRESS", "off")


@pytest.fixture
def _shut_down(_own_folder: None) -> Iterator[None]:
    """Leave no context open behind a page."""
    yield
    ray_fed.shutdown()
    fl.framework.set_no_default_context()


def _run_page(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    # As `__main__`, so that workers are sent its functions and do not import them.
    namespace: dict[str, Any] = {"__name__": "__main__"}
    promised: list[str] = []
    for block in _python_blocks(page):
        if block.not_run is None:
            promised += _PRINT.findall(block.text)
            block.run(namespace)
    lines = capsys.readouterr().out.splitlines()
    # Ray counts the processes of all tests, and warns of their number.
    printed = [line for line in lines if "(raylet)" not in line]
    assert len(printed) == len(promised), printed
    for line, comment in zip(printed, promised, strict=True):
        assert _matches(line, comment), f"`{line}` is not `{comment}`"


@_MODELS_SAVED
@pytest.mark.usefixtures("_shut_down")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page.name in SLOW))
        for page in CODE
        if page.name not in ON_RAY
    ],
    ids=lambda p: p.name,
)
def test_code_runs_and_prints_what_it_says(
    page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    _run_page(page, capsys)


@_MODELS_SAVED
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster", "_shut_down")
@pytest.mark.parametrize("name", ON_RAY)
def test_code_runs_on_a_real_ray(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run_page(Page(_ROOT / name), capsys)


def test_code_that_does_not_run_is_known() -> None:
    found = {
        block.page: block.not_run
        for page in PAGES
        for block in _python_blocks(page)
        if block.not_run is not None
    }

    assert found == NOT_RUN


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in _LINK.findall(page.text)]

    for page, link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), (page.name, link)
        if anchor:
            assert anchor in _anchors(Page(target)), (page.name, link)


def test_files_and_modules_exist() -> None:
    text = "\n".join(page.text for page in PAGES)
    modules = (name.replace(".", "/") for name in _MODULE.findall(text))

    missing = [
        path
        for path in [*_FILE.findall(text), *modules]
        if not (_ROOT / path).exists() and not (_ROOT / f"{path}.py").exists()
    ]
    assert missing == []


def _find_in_package(path: str) -> pathlib.Path | None:
    """Return what a page of the architecture names: in `ray_fed/`, or in the root."""
    found = (folder / path for folder in (_ROOT / "ray_fed", _ROOT))
    return next((place for place in found if place.exists()), None)


def test_architecture_names_what_exists() -> None:
    pages = ("architecture", "changes", "lowering")
    text = "\n".join(Page(_ROOT / f"docs/{page}.md").text for page in pages)
    paths, definitions = _QUOTED_PATH.findall(text), _DEFINED_IN.findall(text)
    assert len(paths) > 50
    assert len(definitions) > 30

    missing = [path for path in paths if _find_in_package(path) is None]
    undefined = [
        (name, path)
        for name, path in definitions
        if (place := _find_in_package(path)) is not None
        and not re.search(
            rf"\b(?:class|def) {name.rpartition('.')[2]}\b",
            place.read_text(encoding="utf-8"),
        )
    ]
    assert missing == []
    assert undefined == []


def test_architecture_describes_every_folder() -> None:
    described = set(_QUOTED_PATH.findall(Page(_ROOT / "docs/architecture.md").text))

    folders = [path.parent for path in (_ROOT / "ray_fed").glob("*/__init__.py")]
    modules = {path.name for path in (_ROOT / "ray_fed").glob("[a-z]*.py")}
    assert {f"{folder.name}/" for folder in folders} | modules <= described


def test_commands_exist() -> None:
    runner = typer.testing.CliRunner()
    found = {
        command.strip() for page in PAGES for command in _COMMAND.findall(page.text)
    }
    assert any(command.startswith("demo") for command in found)

    for command in found:
        words = [word for word in command.split() if re.fullmatch(r"[a-z]+", word)]
        shown = runner.invoke(cli.app, [*words, "--help"], env={"COLUMNS": "200"})
        options = re.findall(r"--[a-z]+", command)
        assert shown.exit_code == 0, command
        assert [option for option in options if option not in shown.output] == []


def test_readme_is_one_page_with_the_first_two_commands() -> None:
    text = Page(_ROOT / "README.md").text

    assert len(text.splitlines()) < 150
    assert '    pip install ".[demo]" && ray-fed demo ' in text
    assert '    pip install -e ".[test]" && pytest ' in text


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("failures.md", _names_of_errors()),
        ("extending.md", framework.__all__),
        ("extending.md", [kind.__name__ for kind in typing.get_args(events.Event)]),
    ],
    ids=["errors", "framework", "events"],
)
def test_table_has_every_name(page: str, names: list[str]) -> None:
    text = Page(_ROOT / "docs" / page).text
    listed = {
        name
        for line in text.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }

    assert [name for name in names if name not in listed] == []


def test_reports_have_what_pages_name() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"last_report\.(\w+)", page.text)
    }

    assert [name for name in sorted(named) if name not in _REPORTED] == []


def test_figures_are_those_of_the_benchmarks() -> None:
    _, _, figures = Page(_ROOT / "docs/performance.md").text.partition("## Figures")
    _, _, speed = Page(_ROOT / "README.md").text.partition("## Speed")
    figures += speed.partition("\n## ")[0]
    taken = set(_NUMBER.findall(Page(_ROOT / "benchmarks/README.md").text))

    found = _NUMBER.findall(figures)
    assert len(found) > 50
    assert [number for number in found if number not in taken] == []


def test_versions_are_one() -> None:
    citation = yaml.safe_load((_ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    versions = (citation["version"], project["project"]["version"])
    assert versions == (ray_fed.__version__,) * 2
    assert citation["license"] == project["project"]["license"]


def test_every_page_is_in_the_index() -> None:
    linked = set(_LINK.findall(Page(_ROOT / "docs/index.md").text))

    pages = {path.name for path in _ROOT.glob("docs/*.md")} - {"index.md"}
    assert pages <= linked


def _fields(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[Any]:
    """Yield name, default and variable of each setting."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if isinstance(field.default, pydantic.BaseModel):
            yield from _fields(type(field.default), f"{path}.")
        else:
            variable = "RAY_FED_" + path.replace(".", "__").upper()
            yield path, json.dumps(field.default), variable


def test_settings_page_has_every_setting_with_its_default() -> None:
    lines = Page(_ROOT / "docs/settings.md").text.splitlines()
    rows = [row for line in lines if (row := _ROW.match(line))]

    assert [(row[1], row[2], row[4]) for row in rows] == list(_fields(ray_fed.Config))
    assert all(row[3].strip() and row[5].strip() for row in rows)
