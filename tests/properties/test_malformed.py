"""Malformed inputs end in an error of the right class, soon, or are no such inputs."""

import collections
import itertools
import logging
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping

import pytest

import ray_fed
from ray_fed import tracebacks
from ray_fed.contexts.execution_context import ExecutionContext
from tests.properties.malformed import OUTCOMES, Case, Place, judge
from tests.properties.malformed_arguments import arguments
from tests.properties.malformed_bytes import computations, files, states
from tests.properties.malformed_clients import clients
from tests.properties.malformed_settings import settings
from tests.properties.malformed_types import types

KINDS: Mapping[str, tuple[Callable[[random.Random, Place], Iterator[Case]], int]] = {
    "argument": (arguments, 600),
    "clients": (clients, 100),
    "type": (types, 300),
    "computation": (computations, 350),
    "setting": (settings, 300),
    "state": (states, 200),
    "file": (files, 150),
}
"""What makes the cases of each kind, and how many of 2,000 there are."""

SEED = 20
PATIENCE_S = 20.0
"""A hundred times what the slowest case takes alone."""


@pytest.fixture(scope="module")
def context() -> Iterator[ExecutionContext]:
    config = ray_fed.Config(backend="local", workers=2, default_num_clients=2)
    with ray_fed.create_context(config) as context:
        yield context


Run = Callable[[float], tuple[collections.Counter[tuple[str, str]], list[str]]]


@pytest.fixture
def run(
    context: ExecutionContext,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Runs a share of the 2,000 cases; returns counts, and words on those that fail."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setenv(tracebacks.VARIABLE, "full")  # `judge` reads who raised

    def run(share: float) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        wrong: list[str] = []
        place = Place(context, tmp_path)
        for name, (make, count) in KINDS.items():
            cases = make(random.Random(f"{SEED} {name}"), place)
            for case in itertools.islice(cases, max(1, round(count * share))):
                outcome, found = judge(case, PATIENCE_S)
                counts[case.kind, outcome] += 1
                if outcome not in ("right", "clear"):
                    wrong.append(_told(case, outcome, found))
        return counts, wrong

    return run


def _told(case: Case, outcome: str, found: str) -> str:
    return f"{outcome}: {case.kind} {case.label[:120]!r}: {found}"


def _table(counts: collections.Counter[tuple[str, str]]) -> str:
    lines = [f"{'':12}" + "".join(f"{outcome:>16}" for outcome in OUTCOMES)]
    for kind in KINDS:
        cells = "".join(f"{counts[kind, outcome]:>16}" for outcome in OUTCOMES)
        lines.append(f"{kind:12}{cells}")
    return "\n".join(lines)


def test_a_hundred_malformed_inputs_end_well(run: Run) -> None:
    counts, wrong = run(0.05)

    assert wrong == []
    assert counts.total() >= 100


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_malformed_inputs_end_well(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    counts, wrong = run(1.0)

    with capsys.disabled():
        print(f"\n{_table(counts)}")  # noqa: T201 (the counts are what it is for)
    assert wrong == []
    assert counts.total() == 2_000
