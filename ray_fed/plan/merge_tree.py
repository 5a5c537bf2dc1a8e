"""Cuts a cohort into leaves of clients, and orders the merges of their results.

The merges follow a binary tree, which `ray_fed.plan.plans` draws.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_LEAVES = 16
"""Number of leaves of a large cohort, which can also have a multiple of this number.
With sixteen, eight, four or two workers, each worker then has one subtree."""


MAX_CLIENTS_PER_LEAF = 64
"""Maximum clients of a leaf by default. Work is repeated by whole leaves."""


Subtree = tuple[int, int]
"""The first leaf of a subtree of the merge tree, and one past its last leaf."""


class Merge(NamedTuple):
    """One merge of two partials in a list.

    Attributes:
        left: Position of the left partial. The merged partial replaces it.
        right: Position of the right partial, which is not needed afterwards.
        subtree: The subtree that the merged partial covers.
    """

    left: int
    right: int
    subtree: Subtree


def cut_leaves(num_clients: int, clients_per_leaf: int | None) -> list[range]:
    """Cut a cohort into leaves, and return the clients of each leaf by index.

    By default, a cohort of fewer than 32 clients has one leaf for each client. A larger
    cohort has sixteen leaves, or the smallest multiple of sixteen for which no leaf has
    more than `MAX_CLIENTS_PER_LEAF` clients. The sizes of leaves differ by at most one.
    An empty cohort has one empty leaf.

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
    """Cut items into at most `num_runs` ranges of neighbors, and return their indices.

    Each range takes ceil(remaining items / remaining ranges), and no range is empty.
    TensorFlow Federated documents this rule for its MergeableCompExecutionContext.
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
    """Return the largest subtrees that cover the leaves from `first` to `stop`.

    `stop` is one past the last leaf. `tree` is the whole tree or a subtree, and leaves
    outside of it are ignored. The result is in the order of the leaves.
    """
    start, end = tree
    if stop <= start or end <= first:
        return []
    if first <= start and end <= stop:
        return [tree]
    return [part for half in _halves(tree) for part in subtrees(first, stop, half)]


def merge_order(trees: Sequence[Subtree]) -> list[Merge]:
    """Return the merges that turn the partials of subtrees into one partial, in order.

    The subtrees are adjacent, and together they are all leaves of one tree. Positions
    in the result are indices in `trees`.
    """
    order: list[Merge] = []
    if trees:
        positions = {tree: position for position, tree in enumerate(trees)}
        _merge((trees[0][0], trees[-1][1]), positions, order)
    return order


def _merge(tree: Subtree, positions: Mapping[Subtree, int], order: list[Merge]) -> int:
    if tree in positions:
        return positions[tree]
    left, right = (_merge(half, positions, order) for half in _halves(tree))
    order.append(Merge(left, right, tree))
    return left
