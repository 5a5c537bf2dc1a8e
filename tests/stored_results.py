"""Bits of many results, stored before a change and compared after it.

    python -m tests.stored_results write FILE     at the commit before
    python -m tests.stored_results check FILE     at the commit after, same machine

Bits hold for one fingerprint (TensorFlow, kind of device, instruction set), so the file
is not part of the project. Only public names are used, so that this runs on both.
"""

# pyright: reportUnknownLambdaType=false

import argparse
import collections
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed
from ray_fed import learning
from ray_fed import tensorflow as rtf
from ray_fed.learning import digits

federated_computation = cast("Callable[..., Any]", fl.federated_computation)
_VECTOR = fl.TensorType(np.float32, (3,))
_EXAMPLES = fl.SequenceType(
    collections.OrderedDict(x=fl.TensorType(np.float32, (4,)), y=np.int32)
)
_NUM_CLIENTS = 37

Job = Callable[[], Any]


def _at_clients(member: Any) -> fl.FederatedType:
    return fl.FederatedType(member, fl.CLIENTS)


def _numbers(size: int) -> list[Any]:
    generator = np.random.default_rng(3)
    return list(generator.normal(size=(_NUM_CLIENTS, size)).astype(np.float32))


def _datasets() -> list[list[Any]]:
    generator = np.random.default_rng(5)
    return [
        [
            collections.OrderedDict(
                x=generator.normal(size=4).astype(np.float32), y=np.int32(k % 3)
            )
            for k in range(3 + client % 5)
        ]
        for client in range(_NUM_CLIENTS)
    ]


@rtf.computation(_VECTOR)
def _noisy(x: Any) -> Any:
    return x / 3 + tf.random.normal([3]) * 0.1


@rtf.computation(_VECTOR)
def _curved(x: Any) -> Any:
    return collections.OrderedDict(s=tf.sin(x), t=tf.reduce_sum(tf.exp(x) / 7))


@rtf.computation(_EXAMPLES)
def _fitted(examples: Any) -> Any:
    batches = examples.shuffle(8).batch(2)

    def step(w: Any, batch: Any) -> Any:
        told = tf.linalg.matvec(batch["x"], w) - tf.cast(batch["y"], tf.float32)
        return w - 0.05 * tf.linalg.matvec(batch["x"], told, transpose_a=True)

    return batches.repeat(2).reduce(tf.zeros([4]), step)


@rtf.computation(_VECTOR)
def _dropped_out(x: Any) -> Any:
    return tf.nn.dropout(x, 0.5)


@rtf.computation(np.float32, np.float32)
def _divide(x: Any, y: Any) -> Any:
    return x / (1 + tf.abs(y))


def _sum_of(work: Any, member: Any) -> Any:
    @federated_computation(_at_clients(member))
    def run(data: Any) -> Any:
        return fl.federated_sum(fl.federated_map(work, data))

    return run


def _mean_of(work: Any, member: Any) -> Any:
    @federated_computation(_at_clients(member))
    def run(data: Any) -> Any:
        return fl.federated_mean(fl.federated_map(work, data))

    return run


@federated_computation(_at_clients(np.float32))
def _normalised(x: Any) -> Any:
    scale = fl.federated_broadcast(fl.federated_sum(x))
    return fl.federated_mean(fl.federated_map(_divide, (x, scale)), x)


@federated_computation(_at_clients(np.float32))
def _at_each(x: Any) -> Any:
    scale = fl.federated_broadcast(fl.federated_mean(x))
    return fl.federated_map(_divide, (x, scale)), fl.federated_max(x)


def _aggregated() -> Any:
    zero = collections.OrderedDict(total=np.float32, count=np.int32)

    @rtf.computation
    def start() -> Any:
        return collections.OrderedDict(total=0.0, count=0)

    @rtf.computation(zero, np.float32)
    def accumulate(held: Any, x: Any) -> Any:
        drawn = tf.random.uniform([])
        return collections.OrderedDict(
            total=held["total"] * 0.9 + x * drawn, count=held["count"] + 1
        )

    @rtf.computation(zero, zero)
    def merge(a: Any, b: Any) -> Any:
        return collections.OrderedDict(
            total=(a["total"] + b["total"]) / 1.1 + tf.random.normal([]) * 1e-3,
            count=a["count"] + b["count"],
        )

    @rtf.computation(zero)
    def report(held: Any) -> Any:
        return held["total"] / tf.cast(held["count"], tf.float32)

    @federated_computation(_at_clients(np.float32))
    def run(x: Any) -> Any:
        return fl.federated_aggregate(x, start(), accumulate, merge, report)

    return run


def _trained(**options: Any) -> Job:
    def run() -> Any:
        clients, test = digits.load_clients(9, seed=1)
        model = digits.build_model(seed=1)
        process = digits.build_process(model)
        cut = [batches[:3] for batches in clients]
        result = learning.run(
            process, cut, num_rounds=2, cohort_size=8, seed=1, **options
        )
        weights = result.state.weights
        evaluate = learning.build_fed_eval(model)
        found = cast("Any", evaluate).next(weights, [test[:1]] * 3)
        return weights.trainable, weights.non_trainable, dict(found)

    return run


def _of(comp: Any, argument: Any) -> Job:
    return lambda: [comp(argument), comp(argument)]


_SCALARS = [float(x[0]) for x in _numbers(1)]
JOBS: Mapping[str, Job] = {
    "sum of vectors": _of(_sum_of(_curved, _VECTOR), _numbers(3)),
    "mean of draws": _of(_mean_of(_noisy, _VECTOR), _numbers(3)),
    "mean of dropout": _of(_mean_of(_dropped_out, _VECTOR), _numbers(3)),
    "sum of fits": _of(_sum_of(_fitted, _EXAMPLES), _datasets()),
    "two stages": _of(_normalised, _SCALARS),
    "values at clients": _of(_at_each, _SCALARS),
    "aggregate that draws": _of(_aggregated(), _SCALARS),
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "kernels": {"backend": "local", "kernels": {"jit": "off"}},
    "interpreted": {"backend": "local", "kernels": {"enabled": False}},
    "small leaves": {
        "backend": "local",
        "clients_per_leaf": 2,
        "subrounds": 5,
        "seed": 9,
        "kernels": {"jit": "off"},
    },
    "ray": {"backend": "ray", "workers": 2, "kernels": {"jit": "off"}},
}
SINGLE: Mapping[str, tuple[Job, Mapping[str, Any]]] = {
    "training, local": (_trained(), CONFIGS["kernels"]),
    "training, interpreted": (_trained(), CONFIGS["interpreted"]),
    "training, XLA": (_trained(), {"backend": "local", "kernels": {"jit": "on"}}),
    "training, vectorised": (
        _trained(),
        {"backend": "local", "kernels": {"jit": "off", "vectorised_clients": 4}},
    ),
    "training, ray": (_trained(), CONFIGS["ray"]),
    "sum of vectors, XLA": (
        JOBS["sum of vectors"],
        {"backend": "local", "kernels": {"jit": "on"}},
    ),
}


def _absorb(digest: Any, value: Any) -> None:
    """Add a result to a hash: containers, dtypes, shapes and bytes."""
    match value:
        case Mapping():
            for name, member in cast("Mapping[str, Any]", value).items():
                digest.update(f"{name}:".encode())
                _absorb(digest, member)
        case list() | tuple():
            members = cast("list[Any]", value)
            digest.update(f"[{len(members)}]".encode())
            for member in members:
                _absorb(digest, member)
        case _:
            array = np.asarray(value)
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())


def compute() -> Iterator[tuple[str, str]]:
    """Yield the name of each result, and the hash of its bits."""
    runs = [
        (f"{job}, {config}", JOBS[job], CONFIGS[config])
        for config in CONFIGS
        for job in JOBS
    ]
    runs += [(name, *run) for name, run in SINGLE.items()]
    runs.sort(key=lambda run: json.dumps(run[2], sort_keys=True))
    for name, job, config in runs:
        made = ray_fed.Config(**config)
        address = None if made.backend == "local" else "local"  # nobody else's Ray
        with (
            ray_fed.create_context(made, address=address) as context,
            fl.framework.get_context_stack().install(context),
        ):
            digest = hashlib.sha256()
            _absorb(digest, job())
            yield name, digest.hexdigest()


def main() -> None:
    """Write or check the bits of all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("file", type=pathlib.Path)
    options = parser.parse_args()
    found = dict(compute())
    if options.action == "write":
        options.file.write_text(json.dumps(found, indent=1, sort_keys=True))
        print(f"{len(found)} results written")  # noqa: T201 (what it is for)
        return
    stored = json.loads(options.file.read_text())
    differing = sorted(
        name for name in stored.keys() | found.keys()
        if stored.get(name) != found.get(name)
    )  # fmt: skip
    print(f"{len(found)} results, {len(differing)} differ: {differing}")  # noqa: T201
    raise SystemExit(bool(differing))


if __name__ == "__main__":
    main()
