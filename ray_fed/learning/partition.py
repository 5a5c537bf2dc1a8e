"""Partitions of examples into clients, for data that has no clients.

Each function returns the indices of each client's examples. Each example belongs to one
client. The same seed gives the same partition.

Sources:
    Tzu-Ming Harry Hsu, Hang Qi, Matthew Brown: Measuring the Effects of Non-Identical
    Data Distribution for Federated Visual Classification. 2019,
    https://arxiv.org/abs/1909.06335, Section 3 (`split_by_label`).

    Mikhail Yurochkin, Mayank Agarwal, Soumya Ghosh, Kristjan Greenewald, Nghia Hoang,
    Yasaman Khazaeni: Bayesian Nonparametric Federated Learning of Neural Networks. ICML
    2019, https://arxiv.org/abs/1905.12022, Section 4 (`dirichlet`).

    Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas:
    Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS
    2017, https://arxiv.org/abs/1602.05629, Section 3 (`shards`).
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.files.opening import expand_home
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.checks import check_positive
from ray_fed.observability.timeline import new_figure

Parts: TypeAlias = list[NDArray[np.int64]]
"""Indices of each client's examples."""

__all__ = [
    "dirichlet",
    "draw_labels",
    "log_normal",
    "natural",
    "shards",
    "split_by_label",
]

_TRIES = 100
"""Number of draws of a Dirichlet partition until every client has enough examples."""


@tracebacks.shorten
def dirichlet(
    labels: NDArray[Any],
    num_clients: int,
    alpha: float,
    *,
    seed: int = 0,
    min_examples: int = 1,
) -> Parts:
    """Divide each label's examples among clients by shares of a Dirichlet distribution.

    The sizes of clients differ. `split_by_label` makes clients of equal size.

    Args:
        labels: Labels of all examples, of any dtype that has an order, [n].
        num_clients: Number of clients, >= 1.
        alpha: Concentration, > 0. With a small value, few clients share a label. With a
            large value, all clients have similar labels.
        seed: Seed of the partition, >= 0.
        min_examples: Least number of examples of a client. Partitions are drawn until
            each client has this many.

    Returns:
        The indices of each client's examples, in random order.

    Raises:
        ConfigError: An argument is out of its range, or none of 100 draws gave each
            client enough examples.
    """
    labels = _read_labels(labels, "labels")
    num_clients = read_whole("num_clients", num_clients, 1, len(labels))
    check_positive("alpha", alpha)
    min_examples = read_whole("min_examples", min_examples, 0)
    seed = read_whole("seed", seed, 0)
    generator = np.random.default_rng(seed)
    for _ in range(_TRIES):
        parts: list[list[NDArray[np.int64]]] = [[] for _ in range(num_clients)]
        for label in np.unique(labels):
            indices = generator.permutation(np.flatnonzero(labels == label))
            shares = generator.dirichlet(np.full(num_clients, alpha))
            ends = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(np.int64)
            for part, taken in zip(parts, np.split(indices, ends), strict=True):
                part.append(taken)
        joined = [generator.permutation(np.concatenate(part)) for part in parts]
        if min(map(len, joined)) >= min_examples:
            return joined
    raise errors.ConfigError(
        f"Expected at least {min_examples} examples for each of {num_clients} clients,"
        f" found fewer in each of {_TRIES} draws: raise `alpha`, or lower a number."
    )


@tracebacks.shorten
def shards(
    labels: NDArray[Any], num_clients: int, shards_per_client: int = 2, *, seed: int = 0
) -> Parts:
    """Sort examples by label, cut them into shards, and give each client some shards.

    Args:
        labels: Labels of all examples, of any dtype that has an order, [n].
        num_clients: Number of clients, >= 1.
        shards_per_client: Number of shards of a client, >= 1. A client has about this
            many labels.
        seed: Seed of the partition, >= 0.

    Returns:
        The indices of each client's examples, in random order.

    Raises:
        ConfigError: An argument is out of its range.
    """
    labels = _read_labels(labels, "labels")
    shards_per_client = read_whole("shards_per_client", shards_per_client, 1)
    most = len(labels) // shards_per_client
    num_clients = read_whole("num_clients", num_clients, 1, most)
    seed = read_whole("seed", seed, 0)
    generator = np.random.default_rng(seed)
    mixed = generator.permutation(len(labels))
    in_order = mixed[np.argsort(labels[mixed], kind="stable")]
    cut = np.array_split(in_order, num_clients * shards_per_client)
    dealt = generator.permutation(len(cut)).reshape(num_clients, shards_per_client)
    return [
        generator.permutation(np.concatenate([cut[shard] for shard in row]))
        for row in dealt
    ]


@tracebacks.shorten
def log_normal(
    num_examples: int, num_clients: int, sigma: float, *, seed: int = 0
) -> Parts:
    """Divide examples at random among clients whose sizes are log-normal.

    Args:
        num_examples: Number of examples, at least `num_clients`. Each client has at
            least one example.
        num_clients: Number of clients, >= 1.
        sigma: Standard deviation of the logarithm of a size, > 0. With 1.5, the largest
            of 1,000 clients is about a hundred times the median.
        seed: Seed of the partition, >= 0.

    Returns:
        The indices of each client's examples, in random order.

    Raises:
        ConfigError: An argument is out of its range.
    """
    num_examples = read_whole("num_examples", num_examples, 1, 2**63 - 1)
    num_clients = read_whole("num_clients", num_clients, 1, num_examples)
    check_positive("sigma", sigma)
    seed = read_whole("seed", seed, 0)
    generator = np.random.default_rng(seed)
    shares = generator.lognormal(0.0, sigma, num_clients)
    spread = np.cumsum(shares / shares.sum()) * (num_examples - num_clients)
    ends = np.round(spread).astype(np.int64) + np.arange(1, num_clients + 1)
    return np.split(generator.permutation(num_examples), ends[:-1])


@tracebacks.shorten
def natural(owners: NDArray[Any]) -> dict[Any, NDArray[np.int64]]:
    """Return a dictionary from each owner to the indices of its examples.

    Owners are sorted, and the indices of each owner ascend.

    Args:
        owners: Owner of each example, such as a writer or a device, [n].

    Raises:
        ConfigError: An example has no owner, or owners have several types.
    """
    names, codes = np.unique(_read_labels(owners, "owners"), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(names)))[:-1]
    is_time = names.dtype.kind in "mM"  # `tolist` makes whole numbers of times
    owned = list(names) if is_time else names.tolist()
    return dict(zip(owned, np.split(order, ends), strict=True))


@tracebacks.shorten
def draw_labels(
    parts: Sequence[NDArray[np.int64]], labels: NDArray[Any], path: Any
) -> None:
    """Plot a partition: a bar for each client, with a section for each label.

    Args:
        parts: Indices of each client's examples.
        labels: Labels of all examples.
        path: Path of the picture. Its suffix decides the format.

    Raises:
        UserError: matplotlib is not installed.
        ConfigError: `parts` are not indices, or `labels` or `path` has another type.
    """
    labels = _read_labels(labels, "labels")
    if not _are_indices(parts, len(labels)):
        raise errors.ConfigError(
            "Expected indices of each client's examples as `parts`, found"
            f" {errors.describe(parts)}: pass a list, such as `list(parts.values())`."
        )
    path = expand_home(path)
    figure = new_figure(8, max(2.0, 0.25 * len(parts)))
    axes = figure.subplots()
    left = np.zeros(len(parts))
    for label in np.unique(labels):
        counts = np.array([(labels[part] == label).sum() for part in parts])
        axes.barh(np.arange(len(parts)), counts, left=left, label=str(label))
        left += counts
    axes.set_xlabel("examples")
    axes.set_ylabel("client")
    axes.invert_yaxis()
    axes.legend(title="label", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


def _are_indices(parts: Any, num_examples: int) -> bool:
    if not isinstance(parts, list | tuple | np.ndarray):
        return False
    for part in parts:
        indices = np.asarray(part)
        is_whole = indices.dtype.kind in "iu" or indices.size == 0
        if indices.ndim != 1 or not is_whole or (indices >= num_examples).any():
            return False
    return True


@tracebacks.shorten
def split_by_label(
    labels: NDArray[Any], num_clients: int, alpha: float, *, seed: int = 0
) -> Parts:
    """Divide examples among clients of equal size that prefer different labels.

    Each client in turn draws its own mix of labels from a Dirichlet distribution around
    the mix of all examples. Then it draws its examples by this mix. Once a label is
    used up, the mix is scaled to the remaining labels.

    Args:
        labels: Labels of all examples, of any dtype that has an order, [n].
        num_clients: Number of clients, 1 to n. Their sizes differ by at most one.
        alpha: Concentration, > 0. With a small value, a client has few labels. With a
            large value, all clients have similar labels.
        seed: Seed of the partition, >= 0.

    Returns:
        The indices of each client's examples, in random order.

    Raises:
        ConfigError: An argument is out of its range, or a label is missing.
    """
    labels = _read_labels(labels, "labels")
    num_clients = read_whole("num_clients", num_clients, 1, len(labels))
    check_positive("alpha", alpha)
    seed = read_whole("seed", seed, 0)
    generator = np.random.default_rng(seed)
    pools = [
        list(generator.permutation(np.flatnonzero(labels == label)))
        for label in np.unique(labels)
    ]
    prior = np.array([len(pool) for pool in pools]) / len(labels)
    sizes = [len(part) for part in np.array_split(np.arange(len(labels)), num_clients)]
    return [
        _draw_examples(generator, generator.dirichlet(alpha * prior), pools, size)
        for size in sizes
    ]


def _read_labels(given: Any, name: str) -> NDArray[Any]:
    labels = np.asarray(given)
    if labels.ndim != 1 or not labels.size:
        raise errors.ConfigError(
            f"Expected one label for each example as `{name}`, found an array of the"
            f" shape {list(labels.shape)}."
        )
    try:
        np.unique(labels)
        hash(tuple(labels.tolist()))
        are_whole = not np.not_equal(labels, labels).any()  # NaN, NaT
        are_whole &= all(label is not None for label in labels)
        if labels.dtype.kind == "U":  # NumPy makes text of 7 beside "7"
            are_whole &= all(isinstance(label, str) for label in given)
    except (TypeError, ValueError):  # NA has no order, nor have mixed types
        are_whole = False
    if not are_whole:
        raise errors.ConfigError(
            f"Expected labels of one type as `{name}`, found missing labels or several"
            " types: leave examples out, such as by `dropna`, or convert all labels to"
            " text, such as by `astype(str)`."
        )
    return labels


def _draw_examples(
    generator: np.random.Generator,
    mix: NDArray[np.float64],
    pools: list[list[np.int64]],
    size: int,
) -> NDArray[np.int64]:
    """Remove `size` examples from the pools of labels, by the mix if possible."""
    drawn: list[np.int64] = []
    while len(drawn) < size:
        left = np.array([len(pool) for pool in pools])
        wanted = np.where(left > 0, mix, 0.0)
        if not wanted.sum() > 0:
            wanted = left.astype(np.float64)
        counts = generator.multinomial(size - len(drawn), wanted / wanted.sum())
        for pool, count in zip(pools, counts, strict=True):
            taken = min(int(count), len(pool))
            drawn.extend(pool[:taken])
            del pool[:taken]
    return generator.permutation(np.array(drawn, np.int64))
