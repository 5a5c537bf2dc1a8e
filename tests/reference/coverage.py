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
import pathlib
import re
import sys

import pytest

from tests.reference.claims import CLAIMS

_DIFFERENCES = pathlib.Path(__file__).with_name("differences.md")
_NEVER_RUN = frozenset({"skip", "skipif", "xfail", "gpu"})


class _Collector:
    """Notes the claims of every test that pytest collects."""

    def __init__(self) -> None:
        self.held: dict[str, set[str]] = collections.defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if any(mark.name in _NEVER_RUN for mark in item.iter_markers()):
                continue
            test, _, _ = item.nodeid.partition("[")
            for mark in item.iter_markers("claim"):
                for claim in mark.args:
                    self.held[claim].add(test)


def _collect_claims() -> dict[str, set[str]]:
    """Return the tests of each claim that a marker names."""
    collector, said = _Collector(), io.StringIO()
    options = ["--collect-only", "-n0", "--quiet", "-m", "", "-p", "no:cacheprovider"]
    with contextlib.redirect_stdout(said):
        code = pytest.main(options, plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(said.getvalue())
    return collector.held


def main() -> int:
    """Print the table; return what the process exits with."""
    held = _collect_claims()
    problems = [f"{name} has no test" for name in CLAIMS if not held.get(name)]
    problems += [
        f"{name} is no claim of any document, but of {', '.join(sorted(held[name]))}"
        for name in sorted(held.keys() - CLAIMS.keys())
    ]
    named = set(re.findall(r"`(\w+\.\d\d)`", _DIFFERENCES.read_text()))
    problems += [f"{name} is none, but of {_DIFFERENCES}" for name in named - {*CLAIMS}]
    lines: list[str] = []
    for name, words in CLAIMS.items():
        document, _, number = name.partition(".")
        lines.append(f"{document:<18}{number}  {words}")
        lines += [f"{'':<22}{test}" for test in sorted(held.get(name, ()))]
    num_held = sum(bool(held.get(name)) for name in CLAIMS)
    tests = {test for name in CLAIMS for test in held.get(name, ())}
    lines += ["", f"{num_held} of {len(CLAIMS)} claims held by {len(tests)} tests"]
    sys.stdout.write("\n".join([*lines, *problems]) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
