"""What is run of each fixture, here as in TensorFlow Federated: numpy alone.

A case calls the fixture's computations, by name, and returns what is to be compared.
`make_fixtures.py` runs it where the computations come from, the tests run it here.
"""

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

Comps: TypeAlias = Mapping[str, Callable[..., Any]]

NUM_CLASSES = 3
NUM_FEATURES = 4


def numbers(*shape: int, start: int = 0) -> Any:
    """Return f32 in [0, 1) that every version of numpy makes alike."""
    index = np.arange(start, start + math.prod(shape))
    return (index * 7919 % 1009 / 1009).astype(np.float32).reshape(shape)


def elements(value: Any) -> list[Any]:
    """Return the elements of a structure, whatever its container."""
    return list(value.values() if isinstance(value, Mapping) else value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors of a result, in order."""
    is_struct = isinstance(value, Iterable) and not isinstance(
        value, str | bytes | np.ndarray
    )
    if not is_struct or hasattr(value, "dtype"):
        yield np.asarray(value)
        return
    for element in elements(value):
        yield from leaves(element)


def batches(client: int) -> list[Any]:
    """Return the data of one client: `client + 1` batches, the last one smaller."""
    sizes = [5] * client + [2]
    return [
        collections.OrderedDict(
            x=numbers(size, NUM_FEATURES, start=100 * client + 20 * index),
            y=np.arange(client, client + size, dtype=np.int32).reshape(size, 1)
            % NUM_CLASSES,
        )
        for index, size in enumerate(sizes)
    ]


def learning(comps: Comps) -> list[Any]:
    """Run two rounds over three clients; return states and metrics."""
    state = comps["initialize"]()
    results = [state]
    for _ in range(2):
        output = comps["next"](state, [batches(client) for client in range(3)])
        state = elements(output)[0]
        results.append(output)
    return results


def evaluation(comps: Comps) -> list[Any]:
    """Evaluate weights on three clients, in an evaluation process."""
    state = comps["initialize"]()
    return [comps["next"](state, [batches(client) for client in range(3)])]


def aggregation(comps: Comps) -> list[Any]:
    """Aggregate weighted structures for three rounds; return all that comes out."""
    state = comps["initialize"]()
    results = [state]
    for index in range(3):
        updates = [
            [numbers(3, start=9 * client + index) * (client + 1), np.float32(client)]
            for client in range(4)
        ]
        weights = [np.float32(client + 1) for client in range(4)]
        output = comps["next"](state, updates, weights)
        state = elements(output)[0]
        results.append(output)
    return results


def unweighted(comps: Comps) -> list[Any]:
    """Aggregate vectors without weights for two rounds."""
    state = comps["initialize"]()
    results = [state]
    for index in range(2):
        updates = [numbers(3, start=9 * client + index) for client in range(4)]
        output = comps["next"](state, updates)
        state = elements(output)[0]
        results.append(output)
    return results


def numbers_to_loop(comps: Comps) -> list[Any]:
    """Call functions whose loops and branches have the same names."""
    return [
        comp(np.int32(number)) for comp in comps.values() for number in (0, 1, 7, 20)
    ]


def strings(comps: Comps) -> list[Any]:
    """Call a function of strings."""
    return [comps["strings"]([b"b a", b"", b"uni c"], "-")]


def bfloat16(comps: Comps) -> list[Any]:
    """Call a function of bfloat16, through its own cast."""
    narrow = comps["narrow"](numbers(4))
    return [narrow, comps["scale"](narrow)]


def unknown_dims(comps: Comps) -> list[Any]:
    """Call functions of unknown dimensions with several shapes."""
    return [comps["rows"](numbers(size, 2)) for size in (0, 1, 3)]


def constant(comps: Comps) -> list[Any]:
    """Read a constant of four megabytes."""
    return [comps["constant"](np.int32(index)) for index in (0, 499_999, 999_999)]


def state_of_calls(comps: Comps) -> list[Any]:
    """Call twice what has variables and tables: each call starts afresh."""
    keys = ["a", "c", "z"]
    return [comps["state"](keys, np.int32(5)) for _ in range(2)]


def datasets(comps: Comps) -> list[Any]:
    """Pass datasets in and out, structured, batched, with an unknown size."""
    rows = [
        collections.OrderedDict(z=np.int32(i), a=numbers(2, start=i)) for i in range(5)
    ]
    return [
        comps["datasets"](rows),
        comps["lengths"]([np.arange(n, dtype=np.int64) for n in (3, 3, 2)]),
        comps["range"](np.int64(4)),
    ]


def sequences(comps: Comps) -> list[Any]:
    """Reduce sequences at clients."""
    data = [np.arange(size, dtype=np.int32) for size in (3, 1, 5)]
    return [comps["sequences"]([list(client) for client in data])]


def intrinsics(comps: Comps) -> list[Any]:
    """Call one computation of many intrinsics."""
    values = [numbers(2, start=client) for client in range(5)]
    weights = [np.float32(client) for client in range(5)]
    integers = [np.int32(3 * client) for client in range(5)]
    return [comps["intrinsics"](values, weights, integers, numbers(2, start=50))]


def no_clients_argument(comps: Comps) -> list[Any]:
    """Call a computation of a server value and constants only."""
    return [comps["server"](np.int32(20))]


def random(comps: Comps) -> list[Any]:
    """Draw twice from stateful ops: compare what any generator gives."""
    draws = [elements(comps["random"](np.int32(1000))) for _ in range(2)]
    normal, uniform = (np.asarray([draw[index] for draw in draws]) for index in (0, 1))
    return [
        np.shape(normal),
        abs(normal.mean()) < 0.1,
        0.9 < normal.std() < 1.1,
        0 <= uniform.min() <= uniform.max() < 6,
        len(np.unique(uniform)),
        (normal[0] == normal[1]).any(),
    ]


CASES: Mapping[str, Callable[[Comps], list[Any]]] = {
    "fed_avg": learning,
    "fed_sgd": learning,
    "mime_lite": learning,
    "fed_eval": evaluation,
    "robust": aggregation,
    "secure": aggregation,
    "compressed": aggregation,
    "tree_noise": unweighted,
    "control_flow": numbers_to_loop,
    "same_names": numbers_to_loop,
    "strings": strings,
    "bfloat16": bfloat16,
    "unknown_dims": unknown_dims,
    "constant": constant,
    "state": state_of_calls,
    "random": random,
    "datasets": datasets,
    "sequences": sequences,
    "intrinsics": intrinsics,
    "server": no_clients_argument,
}
