"""Prints which tests hold which claims of the reference documents.

    python -m tests.reference.coverage

Fails on a claim without a test, and on a test that names a claim which is none. Tests
are found by pytest itself, so a test that is listed exists; one that never runs in
`.ci/run` (skipped, expected to fail, in need of an accelerator) holds nothing. Where
ray_fed differs from a document, `differences.md` says so, and why.
"""

import collections
import contextlib
import io
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.reference import (
    debugging_document,
    eager_tf_document,
    federated_context_document,
    federating_document,
    mergeable_document,
    semantics_document,
)
from tests.reference.claims import Claim, Row, join

CLAIMS: tuple[Claim, ...] = (
    *eager_tf_document.CLAIMS,
    *federating_document.CLAIMS,
    *debugging_document.CLAIMS,
    *mergeable_document.CLAIMS,
    *federated_context_document.CLAIMS,
    *semantics_document.CLAIMS,
)
_NEVER_RUN = frozenset({"skip", "skipif", "xfail", "gpu"})


class _Collector:
    """Notes the claims of every test that pytest collects."""

    def __init__(self) -> None:
        self.held: dict[str, list[str]] = collections.defaultdict(list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if any(mark.name in _NEVER_RUN for mark in item.iter_markers()):
                continue
            test, _, _ = item.nodeid.partition("[")
            for mark in item.iter_markers("claim"):
                for claim in mark.args:
                    self.held[claim].append(test)


def collect_claims(arguments: Sequence[str] = ()) -> Mapping[str, Sequence[str]]:
    """Return the tests of each claim that a marker names.

    Args:
        arguments: more arguments of pytest; by default it finds all tests.

    Raises:
        RuntimeError: pytest could not collect; the message is what it said.
    """
    collector, said = _Collector(), io.StringIO()
    options = ["--collect-only", "-n0", "--quiet", "-m", "", "-p", "no:cacheprovider"]
    with contextlib.redirect_stdout(said):
        code = pytest.main([*options, *arguments], plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(said.getvalue())
    return collector.held


def to_lines(rows: Sequence[Row]) -> list[str]:
    """Return the table: document, claim, words; below, the tests of the claim."""
    lines: list[str] = []
    for row in rows:
        document, _, number = row.claim.id.partition(".")
        lines.append(f"{document:<18}{number}  {row.claim.words}")
        tests = row.tests or (f"waiting: {row.claim.waiting}",)
        if row.problem:
            tests = (*row.tests, f"PROBLEM: {row.problem}")
        lines.extend(f"{'':<22}{test}" for test in tests)
    return lines


def count(rows: Sequence[Row]) -> str:
    """Return how many claims each document has, and how many wait."""
    held: collections.Counter[str] = collections.Counter()
    waiting: collections.Counter[str] = collections.Counter()
    for row in rows:
        document, _, _ = row.claim.id.partition(".")
        held[document] += bool(row.tests)
        waiting[document] += bool(row.claim.waiting)
    parts = [f"{name} {held[name]}" for name in held if held[name]]
    waits = [f"{name} {waiting[name]}" for name in waiting if waiting[name]]
    tests = {test for row in rows for test in row.tests}
    return (
        f"{held.total()} of {len(rows)} claims held by {len(tests)} tests"
        f" ({', '.join(parts)}); {waiting.total()} waiting"
        + (f" ({', '.join(waits)})" if waits else "")
    )


def main() -> int:
    """Print the table; return what the process exits with."""
    rows, problems = join(CLAIMS, collect_claims())
    lines = [*to_lines(rows), "", count(rows), *problems]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
