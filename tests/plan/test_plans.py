"""Leaves, runs and the merge tree: the bits of a result hang on these."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_fed.plan import merge_tree

NUM_LEAVES = st.integers(1, 200)


@pytest.mark.parametrize(
    ("num_clients", "clients_per_leaf", "expected"),
    [
        pytest.param(0, None, [0], id="no client"),
        pytest.param(15, None, [1] * 15, id="fewer than sixteen"),
        pytest.param(31, None, [1] * 31, id="fewer than two sixteenths"),
        pytest.param(32, None, [2] * 16, id="a sixteenth"),
        pytest.param(34, None, [2] * 7 + [3] + [2] * 7 + [3], id="about a sixteenth"),
        pytest.param(1024, None, [merge_tree.MAX_CLIENTS_PER_LEAF] * 16, id="at most"),
        pytest.param(1025, None, [32] * 31 + [33], id="no more than that"),
        pytest.param(10_000, 5000, [5000, 5000], id="as configured"),
        pytest.param(7, 3, [3, 3, 1], id="as configured, but for the last"),
        pytest.param(3, 7, [3], id="more than the cohort"),
    ],
)
def test_leaves_follow_the_cohort_unless_configured(
    num_clients: int, clients_per_leaf: int | None, expected: list[int]
) -> None:
    leaves = merge_tree.cut_leaves(num_clients, clients_per_leaf)

    assert [len(leaf) for leaf in leaves] == expected


@given(st.integers(0, 3000), st.none() | st.integers(1, 40))
def test_leaves_cover_the_cohort_in_order(
    num_clients: int, clients_per_leaf: int | None
) -> None:
    leaves = merge_tree.cut_leaves(num_clients, clients_per_leaf)

    assert [client for leaf in leaves for client in leaf] == list(range(num_clients))
    assert num_clients == 0 or all(leaves)
    sizes = [len(leaf) for leaf in leaves]
    if clients_per_leaf is not None:
        assert all(size == clients_per_leaf for size in sizes[:-1])
    else:
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= merge_tree.MAX_CLIENTS_PER_LEAF


@given(st.integers(32, 3000), st.sampled_from([1, 2, 4, 8, 16]))
def test_each_of_a_power_of_two_of_workers_has_one_subtree(
    num_clients: int, num_runs: int
) -> None:
    num_leaves = len(merge_tree.cut_leaves(num_clients, None))

    for run in merge_tree.cut_runs(num_leaves, num_runs):
        nodes = merge_tree.subtrees(run.start, run.stop, (0, num_leaves))
        assert nodes == [(run.start, run.stop)]


@pytest.mark.claim("semantics.69", "semantics.70")
@given(st.integers(0, 500), st.integers(1, 60))
def test_runs_take_their_share_of_what_remains_rounded_up(
    num_items: int, num_runs: int
) -> None:
    runs = merge_tree.cut_runs(num_items, num_runs)

    assert [item for run in runs for item in run] == list(range(num_items))
    assert all(runs)
    assert len(runs) == min(num_items, num_runs)
    for index, run in enumerate(runs):
        remaining = num_items - run.start
        assert len(run) == -(-remaining // (num_runs - index))


@pytest.mark.parametrize(
    ("first", "stop", "num_leaves", "nodes"),
    [
        pytest.param(0, 8, 8, [(0, 8)], id="the whole tree"),
        pytest.param(0, 5, 5, [(0, 5)], id="the whole of another tree"),
        pytest.param(0, 3, 5, [(0, 3)], id="the larger half"),
        pytest.param(1, 8, 8, [(1, 2), (2, 4), (4, 8)], id="all but the first"),
        pytest.param(0, 7, 8, [(0, 4), (4, 6), (6, 7)], id="all but the last"),
        pytest.param(4, 7, 7, [(4, 7)], id="the smaller half"),
        pytest.param(5, 7, 7, [(5, 6), (6, 7)], id="two leaves of different parents"),
        pytest.param(3, 3, 8, [], id="no leaf"),
    ],
)
def test_subtrees_are_the_largest_whole_ones(
    first: int, stop: int, num_leaves: int, nodes: list[merge_tree.Subtree]
) -> None:
    assert merge_tree.subtrees(first, stop, (0, num_leaves)) == nodes


@st.composite
def _cuts(draw: st.DrawFn) -> tuple[int, list[range]]:
    """A number of leaves, cut anywhere into contiguous runs."""
    num_leaves = draw(NUM_LEAVES)
    inner = st.sets(st.integers(1, max(1, num_leaves - 1)), max_size=12)
    bounds = sorted(draw(inner) | {0, num_leaves})
    return num_leaves, [
        range(start, stop) for start, stop in itertools.pairwise(bounds)
    ]


def _nodes(runs: list[range], num_leaves: int) -> list[merge_tree.Subtree]:
    tree = (0, num_leaves)
    return [n for run in runs for n in merge_tree.subtrees(run.start, run.stop, tree)]


def _fold(partials: list[Any], nodes: list[merge_tree.Subtree]) -> Any:
    """Merge as evaluators do; a merge is written down as a pair."""
    partials = list(partials)
    merged_away: set[int] = set()
    for left, right, _ in merge_tree.merge_order(nodes):
        assert not {left, right} & merged_away
        partials[left] = (partials[left], partials[right])
        merged_away.add(right)
    assert merged_away == set(range(1, len(partials)))
    return partials[0]


def _leaves(start: int, stop: int) -> Any:
    return _fold(
        list(range(start, stop)), [(leaf, leaf + 1) for leaf in range(start, stop)]
    )


@given(_cuts())
def test_any_cut_into_runs_gives_the_merge_tree_of_no_cut(
    cut: tuple[int, list[range]],
) -> None:
    num_leaves, runs = cut
    nodes = _nodes(runs, num_leaves)
    leaves = [leaf for start, stop in nodes for leaf in range(start, stop)]
    assert leaves == list(range(num_leaves))
    assert all(merge_tree.subtrees(*n, (0, num_leaves)) == [n] for n in nodes)
    partials = [_leaves(start, stop) for start, stop in nodes]

    merged = _fold(partials, nodes)

    assert merged == _leaves(0, num_leaves)


@pytest.mark.parametrize(
    ("num_leaves", "tree"),
    [
        pytest.param(1, 0, id="one"),
        pytest.param(2, (0, 1), id="two"),
        pytest.param(3, ((0, 1), 2), id="three"),
        pytest.param(4, ((0, 1), (2, 3)), id="four"),
        pytest.param(5, (((0, 1), 2), (3, 4)), id="five"),
        pytest.param(7, (((0, 1), (2, 3)), ((4, 5), 6)), id="seven"),
    ],
)
def test_merge_tree_is_binary_over_leaves(num_leaves: int, tree: Any) -> None:
    assert _leaves(0, num_leaves) == tree


@given(st.integers(1, 200))
def test_merge_tree_is_as_deep_as_a_binary_tree(num_leaves: int) -> None:
    def depth(tree: Any) -> int:
        return 1 + max(depth(t) for t in tree) if isinstance(tree, tuple) else 0

    assert depth(_leaves(0, num_leaves)) == (num_leaves - 1).bit_length()
