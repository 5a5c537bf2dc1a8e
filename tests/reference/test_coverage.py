"""The table that says which tests hold which claims."""

import pathlib
import re

import pytest

from tests.reference import coverage
from tests.reference.claims import Claim, join, read_claims

FIRST = Claim("paper.01", "Says something.")
SECOND = Claim("paper.02", "Says more.")
LATER = Claim("paper.03", "Says what comes.", waiting="not built yet")
TESTS = """
import pytest

class TestAll:
    pytestmark = pytest.mark.claim("paper.01")

    @pytest.mark.slow
    @pytest.mark.parametrize("x", [1, 2])
    def test_some(self, x): pass

    @pytest.mark.claim("paper.02", "paper.03")
    def test_more(self): pass

    @pytest.mark.parametrize(
        "x", [1, pytest.param(2, marks=pytest.mark.claim("paper.04"))]
    )
    def test_one(self, x): pass

@pytest.mark.skip
@pytest.mark.claim("paper.05")
def test_never(): pass

@pytest.mark.gpu
@pytest.mark.claim("paper.05")
def test_elsewhere(): pass

@pytest.mark.xfail
@pytest.mark.claim("paper.05")
def test_failing(): pass
"""


def test_claims_are_read_by_paragraph() -> None:
    text = """
01  Says something,
    and more.
02  Says what comes.
"""

    claims = read_claims("paper", text, {"02": "not built yet"})

    assert claims == (
        Claim("paper.01", "Says something, and more."),
        Claim("paper.02", "Says what comes.", "not built yet"),
    )


@pytest.mark.parametrize(
    ("text", "waiting"),
    [
        pytest.param("01  One.\n03  Three.", {}, id="a gap"),
        pytest.param("01  One.\n01  One.", {}, id="twice"),
        pytest.param("01  One.\nTwo.", {}, id="no number"),
        pytest.param("01  One.", {"02": "not built"}, id="reason for no claim"),
    ],
)
def test_claims_are_numbered_without_gaps(text: str, waiting: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"Expected .* of paper, found"):
        read_claims("paper", text, waiting)


def test_each_claim_has_its_tests_once() -> None:
    held = {"paper.02": ["b.py::test_b", "a.py::test_a", "a.py::test_a"]}

    rows, problems = join([SECOND, LATER], held)

    assert [row.tests for row in rows] == [("a.py::test_a", "b.py::test_b"), ()]
    assert problems == []


def test_claim_without_a_test_is_a_problem() -> None:
    _, problems = join([FIRST, SECOND], {"paper.02": ["a.py::test_a"]})

    assert problems == ["paper.01 has no test"]


def test_claim_that_is_none_is_a_problem() -> None:
    _, problems = join([FIRST], {"paper.01": ["test_a"], "paper.1": ["test_b"]})

    assert problems == ["paper.1 is no claim of any document, but of test_b"]


def test_waiting_claim_with_a_test_waits_no_longer() -> None:
    _, problems = join([LATER], {"paper.03": ["test_a"]})

    assert problems == ["paper.03 has tests, though it waits"]


def test_table_shows_tests_reasons_and_problems() -> None:
    rows, _ = join([FIRST, SECOND, LATER], {"paper.02": ["a.py::test_a"]})

    assert [line.split() for line in coverage.to_lines(rows)] == [
        ["paper", "01", "Says", "something."],
        ["PROBLEM:", "has", "no", "test"],
        ["paper", "02", "Says", "more."],
        ["a.py::test_a"],
        ["paper", "03", "Says", "what", "comes."],
        ["waiting:", "not", "built", "yet"],
    ]
    assert coverage.count(rows) == (
        "1 of 3 claims held by 1 tests (paper 1); 1 waiting (paper 1)"
    )


@pytest.fixture
def foreign(tmp_path: pathlib.Path) -> list[str]:
    """Arguments of pytest for a test suite of its own."""
    settings = tmp_path / "pytest.ini"
    markers = "\n".join(f"    {name}" for name in ("claim", "gpu", "slow"))
    settings.write_text(f"[pytest]\naddopts = -m 'not slow'\nmarkers =\n{markers}\n")
    return ["-c", str(settings), f"--rootdir={tmp_path}", str(tmp_path)]


def test_tests_are_those_that_pytest_collects_and_runs(
    tmp_path: pathlib.Path, foreign: list[str]
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)

    held = coverage.collect_claims(foreign)

    some, more, one = (
        f"test_some.py::TestAll::{name}"
        for name in ("test_some", "test_more", "test_one")
    )
    assert held == {
        "paper.01": [some, some, more, one, one],
        "paper.02": [more],
        "paper.03": [more],
        "paper.04": [one],
    }


def test_suite_that_cannot_be_collected_is_an_error(
    tmp_path: pathlib.Path, foreign: list[str]
) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name")

    with pytest.raises(RuntimeError, match="nothing_of_that_name"):
        coverage.collect_claims(foreign)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param({"paper.01": ["test_a"]}, 0, id="all held"),
        pytest.param({}, 1, id="not held"),
        pytest.param({"paper.01": ["test_a"], "x.01": ["test_a"]}, 1, id="unknown"),
    ],
)
def test_command_fails_where_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    held: dict[str, list[str]],
    expected: int,
) -> None:
    monkeypatch.setattr(coverage, "CLAIMS", (FIRST,))
    monkeypatch.setattr(coverage, "collect_claims", lambda: held)

    assert coverage.main() == expected
    assert "Says something." in capsys.readouterr().out


def test_differences_name_claims_that_there_are() -> None:
    page = pathlib.Path(coverage.__file__).with_name("differences.md").read_text()
    documents = {claim.id.partition(".")[0] for claim in coverage.CLAIMS}

    named = re.findall(r"`(\w+)\.(\d\d)`", page)

    ids = {f"{document}.{number}" for document, number in named}
    assert ids <= {claim.id for claim in coverage.CLAIMS}
    assert {document for document, _ in named} == documents


def test_documents_number_each_claim_once() -> None:
    ids = [claim.id for claim in coverage.CLAIMS]

    assert len(set(ids)) == len(ids)
    assert {name.partition(".")[0] for name in ids} == {
        "eager_tf", "federating", "debugging", "mergeable", "federated_context",
        "semantics",
    }  # fmt: skip
