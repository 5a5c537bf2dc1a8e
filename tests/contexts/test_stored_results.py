"""Programs have the bits that are stored, whatever runs them; see `stored_results`."""

import functools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest

import ray_fed
from tests import stored_results
from tests.fixtures import ContextFactory
from tests.stored_results import HANG_ON, LEARNING, PROGRAMS, SETTINGS

Expected = Callable[[str], str]

STORED = json.loads(stored_results.FILE.read_text())

A_FEW = (
    "order of sums", "round with a state", "merge tree as a text",
    "three stages and values at clients", "selection by keys that clients compute",
    "draws of clients", "pipelines of datasets", "merge that hangs on the argument",
    "fed avg", "scaffold",
)  # fmt: skip
"""One of each family: these run by default."""


def cases(names: Sequence[str], quick: Collection[str]) -> list[Any]:
    """Return names of programs; all but the quick ones, and those that learn, slow."""
    marks = {
        name: [] if name in quick and HANG_ON[name] != LEARNING else [pytest.mark.slow]
        for name in names
    }
    return [pytest.param(name, marks=marks[name], id=name) for name in names]


def is_stored_for_here(facts: Sequence[str]) -> bool:
    here, there = stored_results.environment(), STORED["environment"]
    return all(here[fact] == there[fact] for fact in facts)


def digest(name: str, invoke: stored_results.Invoke) -> str:
    return stored_results.digest_of(PROGRAMS[name]().run(invoke))


@pytest.fixture(scope="session")
def expected() -> Iterator[Expected]:
    """Digests by name: as stored, or of one thread where those are of no use here."""
    config = ray_fed.Config(backend="local", workers=1, **SETTINGS)
    with ray_fed.create_context(config) as context:

        @functools.cache
        def of(name: str) -> str:
            if is_stored_for_here(HANG_ON[name]):
                return STORED["results"][name]
            context.resume_at(0)
            return digest(name, context.invoke)

        yield of


def test_each_program_is_stored() -> None:
    assert STORED["results"].keys() == STORED["identities"].keys() == PROGRAMS.keys()


@pytest.mark.parametrize("name", cases(tuple(PROGRAMS), PROGRAMS.keys()))
def test_graphs_have_the_stored_identities(name: str) -> None:
    if not is_stored_for_here(stored_results.IDENTITIES):
        pytest.skip(f"other versions than {STORED['environment']} make other graphs")

    assert stored_results.identities_of(name) == STORED["identities"][name]


@pytest.mark.parametrize("name", cases(tuple(PROGRAMS), A_FEW))
def test_kernels_have_the_stored_bits(
    local_contexts: ContextFactory, expected: Expected, name: str
) -> None:
    context = local_contexts(workers=2, subrounds=3, **SETTINGS)

    assert digest(name, context.invoke) == expected(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in A_FEW if HANG_ON[n] != LEARNING])
def test_interpreter_has_the_stored_bits(
    local_contexts: ContextFactory, expected: Expected, name: str
) -> None:
    context = local_contexts(workers=2, kernels={"enabled": False}, **SETTINGS)

    assert digest(name, context.invoke) == expected(name)
