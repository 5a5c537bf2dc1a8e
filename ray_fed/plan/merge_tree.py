"""The leaves of a cohort, and the tree along which their partials are merged."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_LEAVES = 16
"""A large cohort has this number of leaves, or a multiple. With sixteen, eight, four or
two workers, the leaves of each worker are then one subtree."""


MAX_CLIENTS_PER_LEAF = 64
"""A leaf is the unit of work that is repeated after a failure: keep it short."""


Subtree = tuple[int, int]
"""A subtree of the merge tree: its first leaf, and one past its last leaf."""


class Merge(NamedTuple):
    """One merge of two partials, in a list of partials of adjacent subtrees.

    Attributes:
        left: Position of the left partial. The merged partial replaces it.
        right: Position of the right partial, which is not needed after the merge.
        subtree: The subtree that the merged partial covers.
    """

    left: int
    right: int
    subtree: Subtree


def cut_leaves(num_clients: int, clients_per_leaf: int | None) -> list[range]:
    """Cut a cohort into leaves of contiguous clients. An empty cohort is one leaf.

    By default, a cohort of fewer than 32 clients has one leaf for each client. A larger
    cohort has sixteen leaves, or the smallest multiple of sixteen for which no leaf has
    more than `MAX_CLIENTS_PER_LEAF` clients. Their sizes differ by at most one.

    Args:
        num_clients: Size of the cohort, >= 0.
        clients_per_leaf: Size of each leaf but the last, >= 1, or None for the default.
    """
    if clients_per_leaf is None:
        count = num_clients
        if num_clients >= 2 * _LEAVES:
            count = _LEAVES * -(-num_clients // (_LEAVES * MAX_CLIENTS_PER_LEAF))
        bounds = [num_clients * index // max(1, count) for index in range(count + 1)]
    else:
        bounds = [*range(0, num_clients, clients_per_leaf), num_clients]
    return [range(*pair) for pair in itertools.pairwise(bounds)] or [range(0)]


def cut_runs(num_items: int, num_runs: int) -> list[range]:
    """Cut items into at most `num_runs` contiguous runs, none of them empty.

    Each run takes ceil(remaining items / remaining runs), as the documentation of
    MergeableCompExecutionContext says.
    """
    runs: list[range] = []
    start = 0
    for remaining in range(num_runs, 0, -1):
        if start == num_items:
            break
        size = -(-(num_items - start) // remaining)
        runs.append(range(start, start + size))
        start += size
    return runs


def _halves(tree: Subtree) -> tuple[Subtree, Subtree]:
    first, end = tree
    middle = first + (end - first + 1) // 2
    return (first, middle), (middle, end)


def subtrees(first: int, stop: int, tree: Subtree) -> list[Subtree]:
    """Return the largest whole subtrees that cover some leaves of a tree, in order.

    Args:
        first: First leaf to cover.
        stop: One past the last leaf to cover.
        tree: The whole tree, or a subtree. Leaves outside it are ignored.
    """
    start, end = tree
    if stop <= start or end <= first:
        return []
    if first <= start and end <= stop:
        return [tree]
    return [part for half in _halves(tree) for part in subtrees(first, stop, half)]


def merge_order(trees: Sequence[Subtree]) -> list[Merge]:
    """Return the merges that turn adjacent subtrees into one, bottom up.

    The whole subtrees cover the leaves of one tree, in order.
    """
    order: list[Merge] = []
    if trees:
        positions = {tree: position for position, tree in enumerate(trees)}
        _merge((trees[0][0], trees[-1][1]), positions, order)
    return order


def _merge(tree: Subtree, positions: Mapping[Subtree, int], order: list[Merge]) -> int:
    """Append the merges of a tree, and return the position of its partial."""
    if tree in positions:
        return positions[tree]
    left, right = (_merge(half, positions, order) for half in _halves(tree))
    order.append(Merge(left, right, tree))
    return left
