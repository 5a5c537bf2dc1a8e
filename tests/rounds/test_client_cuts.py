"""A round's argument is cut and put together by index."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ray_fed.errors as errors
import ray_fed.rounds.client_cuts as client_cuts
import ray_fed.values.plain_values as plain_values
from ray_fed.plan import merge_tree
from ray_fed.rounds.client_cuts import CohortCut, RoundPolicy
from ray_fed.values.stored import External, StoredClients, slice_clients

INT = fl.TensorType(np.int32)
AT_CLIENTS = fl.FederatedType(INT, fl.CLIENTS)
ALL_EQUAL = fl.FederatedType(INT, fl.CLIENTS, True)
AT_SERVER = fl.FederatedType(INT, fl.SERVER)
NESTED = fl.to_type([("x", AT_CLIENTS), ("more", [AT_SERVER, AT_CLIENTS])])


@pytest.mark.claim("semantics.63")
@pytest.mark.parametrize(
    ("arg", "type_spec", "expected"),
    [
        pytest.param([1, 2, 3], AT_CLIENTS, 3, id="list"),
        pytest.param((1, 2), AT_CLIENTS, 2, id="tuple"),
        pytest.param([], AT_CLIENTS, 0, id="empty cohort"),
        pytest.param(StoredClients("key", 4, 9), AT_CLIENTS, 5, id="stored clients"),
        pytest.param(([1, 2], (7, [3, 4])), NESTED, 2, id="nested"),
        pytest.param({"x": [1], "more": (7, [3])}, NESTED, 1, id="nested, by name"),
        pytest.param(7, AT_SERVER, 11, id="server only: the default"),
        pytest.param(7, ALL_EQUAL, 11, id="all equal: the default"),
        pytest.param(7, INT, 11, id="unplaced: the default"),
        pytest.param((), fl.StructType([]), 11, id="empty struct: the default"),
        pytest.param(None, None, 11, id="no argument: the default"),
    ],
)
def test_cohort_is_as_large_as_the_argument_says(
    arg: Any, type_spec: fl.Type | None, expected: int
) -> None:
    assert client_cuts.count_clients(arg, type_spec, 11) == expected


@pytest.mark.claim("semantics.65")
@pytest.mark.parametrize("arg", [3, {1, 2}, "12", np.zeros(2, np.int32)])
def test_cohort_must_be_a_sequence(arg: Any) -> None:
    with pytest.raises(errors.ValueMismatchError, match="for each client"):
        client_cuts.count_clients(arg, AT_CLIENTS, 0)


@pytest.mark.claim("semantics.79")
@pytest.mark.parametrize(
    ("arg", "type_spec", "expected"),
    [
        pytest.param([1, 2, 3, 4], AT_CLIENTS, [2, 3], id="clients"),
        pytest.param((1, 2, 3, 4), AT_CLIENTS, (2, 3), id="tuple"),
        pytest.param(7, AT_SERVER, 7, id="server"),
        pytest.param(7, ALL_EQUAL, 7, id="all equal"),
        pytest.param((), fl.StructType([]), (), id="empty struct"),
        pytest.param(None, None, None, id="no argument"),
        pytest.param(
            StoredClients("key", 10, 20),
            AT_CLIENTS,
            StoredClients("key", 11, 13),
            id="stored clients",
        ),
        pytest.param(
            ([1, 2, 3, 4], (7, [5, 6, 7, 8])),
            NESTED,
            ([2, 3], (7, [6, 7])),
            id="nested",
        ),
        pytest.param(
            (7, ()),
            fl.to_type([AT_SERVER, fl.StructType([])]),
            (7, ()),
            id="empty unplaced struct beside a placed value",
        ),
    ],
)
def test_slice_takes_the_values_of_some_clients(
    arg: Any, type_spec: fl.Type | None, expected: Any
) -> None:
    assert slice_clients(arg, type_spec, range(1, 3)) == expected


@pytest.mark.parametrize(
    ("results", "type_spec", "expected"),
    [
        pytest.param([[1, 2], [3]], AT_CLIENTS, [1, 2, 3], id="clients, in order"),
        pytest.param([[], [3]], AT_CLIENTS, [3], id="an empty leaf"),
        pytest.param([[1]], AT_CLIENTS, [1], id="one leaf"),
        pytest.param([7, 7], AT_SERVER, 7, id="server"),
        pytest.param([7, 7], ALL_EQUAL, 7, id="all equal"),
        pytest.param([(1, 2), (1, 2)], fl.to_type([INT, INT]), (1, 2), id="unplaced"),
        pytest.param(
            [([1, 2], (7, [5, 6])), ([3], (7, [7]))],
            NESTED,
            ([1, 2, 3], (7, [5, 6, 7])),
            id="nested",
        ),
    ],
)
def test_results_of_leaves_are_joined_in_client_order(
    results: list[Any], type_spec: fl.Type, expected: Any
) -> None:
    assert client_cuts.join_results(results, type_spec) == expected


@given(st.integers(1, 60), st.none() | st.integers(1, 9))
def test_join_undoes_the_cut_into_leaves(
    num_clients: int, clients_per_leaf: int | None
) -> None:
    cohort = list(range(num_clients))
    arg = (cohort, (7, cohort[::-1]))
    leaves = merge_tree.cut_leaves(num_clients, clients_per_leaf)

    slices = [slice_clients(arg, NESTED, leaf) for leaf in leaves]

    assert client_cuts.join_results(slices, NESTED) == arg
    assert [client_cuts.count_clients(part, NESTED, 0) for part in slices] == [
        len(leaf) for leaf in leaves
    ]


DATA = fl.FederatedType(fl.SequenceType(np.int32), fl.CLIENTS)
BATCHES = fl.FederatedType(fl.SequenceType(fl.TensorType(np.int32, [None])), fl.CLIENTS)


def as_plain(value: Any, type_spec: fl.Type) -> Any:
    return plain_values.to_plain(value, type_spec, "a value")


@pytest.mark.parametrize(
    ("value", "type_spec", "expected"),
    [
        pytest.param([[1, 2, 3], []], DATA, [13, 10], id="elements"),
        pytest.param([[[1, 2], [3]], [[4]]], BATCHES, [13, 11], id="rows of batches"),
        pytest.param(
            [([1], [2, 3]), ([4], [])],
            fl.FederatedType(fl.StructType([DATA.member] * 2), fl.CLIENTS),
            [13, 11],
            id="two sequences a client",
        ),
        pytest.param(
            ([[1], [1, 2]], [5, 6]),
            fl.StructType([DATA, AT_CLIENTS]),
            [11, 12],
            id="beside a number",
        ),
        pytest.param([1, 2], AT_CLIENTS, None, id="no sequence"),
        pytest.param([[1], External("a.npz"), [1]], DATA, None, id="a file among them"),
        pytest.param([], DATA, None, id="no clients"),
    ],
)
def test_clients_weigh_their_rows(
    value: Any, type_spec: fl.Type, expected: list[int] | None
) -> None:
    found = client_cuts.weigh_clients(as_plain(value, type_spec), type_spec)

    assert (None if found is None else found.tolist()) == expected


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 12))
def test_runs_by_weight_cover_all_and_none_is_empty(
    weights: list[int], num_runs: int
) -> None:
    runs = client_cuts.cut_by_weight(weights, num_runs)

    assert [item for run in runs for item in run] == list(range(len(weights)))
    assert all(runs)
    assert len(runs) == min(num_runs, len(weights))


def test_runs_by_weight_are_balanced() -> None:
    weights = [100, 1, 1, 1, 1, 96, 50, 50]

    runs = client_cuts.cut_by_weight(weights, 3)

    assert [sum(weights[i] for i in run) for run in runs] == [100, 100, 100]


def test_equal_weights_are_cut_as_counts_are() -> None:
    assert client_cuts.cut_by_weight([7] * 12, 4) == merge_tree.cut_runs(12, 4)


def test_heaviest_run_is_begun_first() -> None:
    policy = RoundPolicy(
        cut_leaves=lambda n: merge_tree.cut_leaves(n, 1), num_subrounds=3
    )

    cut = CohortCut.of(3, 1, policy, DATA, np.array([5.0, 9.0, 7.0]))

    assert cut.heaviest_first == (1, 2, 0)


def cut_for(num_workers: int, num_subrounds: int | None, *, spreads: bool) -> CohortCut:
    policy = RoundPolicy(
        cut_leaves=lambda n: merge_tree.cut_leaves(n, 1),
        num_subrounds=num_subrounds,
        spreads_subrounds=spreads,
    )
    return CohortCut.of(8, num_workers, policy, DATA)


@pytest.mark.parametrize(
    ("num_workers", "num_subrounds", "num_chunks"),
    [
        pytest.param(4, 1, [4], id="one subround"),
        pytest.param(4, 2, [2, 2], id="two"),
        pytest.param(4, 3, [1, 1, 1], id="too few for all"),
        pytest.param(4, None, [1, 1, 1, 1], id="as many as workers"),
        pytest.param(20, 1, [8], id="more workers than leaves"),
    ],
)
def test_subrounds_are_cut_for_the_workers_that_they_may_have(
    num_workers: int, num_subrounds: int | None, num_chunks: list[int]
) -> None:
    cut = cut_for(num_workers, num_subrounds, spreads=True)

    assert [len(chunks) for chunks in cut.chunks] == num_chunks
    for run, chunks in zip(cut.runs, cut.chunks, strict=True):
        assert [leaf for chunk in chunks for leaf in chunk] == list(run)
    assert cut_for(4, 2, spreads=False).chunks == ((range(4),), (range(4, 8),))


def test_partials_are_those_of_chunks() -> None:
    cut = cut_for(3, 1, spreads=True)

    assert cut.chunks == ((range(3), range(3, 6), range(6, 8)),)
    assert cut.subtrees[0] == ((0, 2), (2, 3), (3, 4), (4, 6), (6, 8))


def test_left_out_clients_keep_their_number() -> None:
    found = client_cuts.without_clients(([1, 2], (7, [3, 4])), NESTED)

    gone = StoredClients(None, 0, 2)
    assert found == (gone, (7, gone))
