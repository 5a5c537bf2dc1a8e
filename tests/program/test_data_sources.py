"""Data sources of programs: cohorts, and iterators that are saved and resumed."""

import asyncio
import pathlib
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.program import (
    ClientData,
    ClientDataIterator,
    ClientDataSource,
    FileProgramStateManager,
    PoissonSampler,
    UniformSampler,
)


def build_source(count: int = 30, sampler: Any = None) -> ClientDataSource:
    data = ClientData.from_values([float(i) for i in range(count)], np.float32)
    return ClientDataSource(data, sampler or UniformSampler(7))


def test_source_is_one_of_federated_language() -> None:
    source = build_source()
    iterator = source.iterator()

    assert isinstance(source, fl.program.FederatedDataSource)
    assert isinstance(iterator, fl.program.FederatedDataSourceIterator)
    assert str(source.federated_type) == str(iterator.federated_type)
    assert str(source.federated_type) == "{float32}@CLIENTS"
    assert len(iterator.select(4)) == 4


@pytest.mark.parametrize("sampler", [UniformSampler(1), PoissonSampler(seed=1)])
def test_resumed_iterator_draws_the_cohorts_that_were_left(sampler: Any) -> None:
    whole = build_source(sampler=sampler).iterator()
    cohorts = [whole.select(5).ids for _ in range(6)]
    begun = build_source(sampler=sampler).iterator()
    for _ in range(2):
        begun.select(5)

    for saved in (begun, begun.state, begun.to_bytes()):
        resumed = build_source(sampler=sampler).resume(saved)
        assert [resumed.select(5).ids for _ in range(4)] == cohorts[2:]


def test_iterator_is_saved_with_the_state_of_a_program(tmp_path: pathlib.Path) -> None:
    source = build_source()
    iterator = source.iterator()
    iterator.select(3)
    manager = FileProgramStateManager(tmp_path)

    asyncio.run(manager.save({"cohorts": iterator, "round": 1}, 1))
    template = {"cohorts": source.iterator(), "round": 0}
    state, version = asyncio.run(manager.load_latest(template))

    assert version == 1
    resumed = source.resume(state["cohorts"])
    assert resumed.select(3).ids == iterator.select(3).ids


def test_cohort_is_an_argument(local_contexts: Any) -> None:
    @fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
    def total(values: Any) -> Any:
        return fl.federated_sum(values)

    cohort = build_source().iterator().select(4)

    expected = sum(map(int, map(str, cohort.ids)))
    assert local_contexts(workers=1).invoke(total, cohort) == expected


def test_another_run_is_refused() -> None:
    saved = build_source().iterator().to_bytes()

    with pytest.raises(errors.ConfigError, match="Expected the clients of the run"):
        build_source(31).resume(saved)
    with pytest.raises(errors.ConfigError, match="Expected the sampler of the run"):
        build_source(sampler=UniformSampler(8)).resume(saved)


@pytest.mark.parametrize("buffer", [b"\xff", b"[]", b'{"round_index": 3}', b"null"])
def test_bytes_of_something_else_are_refused(buffer: bytes) -> None:
    with pytest.raises(errors.SavedStateError, match="iterator"):
        ClientDataIterator.from_bytes(buffer)


def test_iterator_out_of_a_file_is_resumed_first() -> None:
    iterator = ClientDataIterator.from_bytes(build_source().iterator().to_bytes())

    with pytest.raises(errors.ContextStateError, match=r"source\.resume"):
        iterator.select(2)


class First:
    """A sampler without a text of its own."""

    def __init__(self, drawn: Any) -> None:
        self.drawn = drawn

    def sample(self, *_: object) -> Any:
        return self.drawn


def test_source_with_a_sampler_of_ones_own_is_resumed() -> None:
    saved = build_source(sampler=First([1, 2])).iterator().to_bytes()

    build_source(sampler=First([1, 2])).resume(saved)
    with pytest.raises(errors.ConfigError, match="Expected the sampler of the run"):
        build_source(sampler=First([1, 3])).resume(saved)


def test_source_whose_rows_are_arranged_in_another_way_is_refused() -> None:
    rows = ClientData.from_values([[1.0, 2.0], [3.0]], fl.SequenceType(np.float32))
    saved = ClientDataSource(rows.batch(2)).iterator().to_bytes()

    ClientDataSource(rows.batch(2)).resume(saved)
    for other in (rows.batch(1), rows.batch(2).take(1), rows.batch(2).shuffle(1)):
        with pytest.raises(errors.ConfigError, match="Expected the clients of the run"):
            ClientDataSource(other).resume(saved)


@pytest.mark.parametrize("drawn", [[0, True], [1, 1], [30], [1.0], None], ids=repr)
def test_sampler_that_draws_no_clients_is_refused(drawn: Any) -> None:
    with pytest.raises(errors.ConfigError, match=r"different indices .*from 0 to 29"):
        build_source(sampler=First(drawn)).iterator().select()
