"""Prints one line of JSON: rounds of other libraries beside ray_fed's, in one run.

    python -m benchmarks.peers --workload tiny --clients 1000 --workers 2

Each peer is installed into an environment of its own, under --cache. It runs with all
of its settings for a moment; with the fastest it takes turns with ray_fed, on the same
data, from the same weights, to the same result: a peer whose weights after a round
differ from plain TensorFlow's is not compared. What does not install or run is named
under `failed`, with the last line it said.
"""

import argparse
import contextlib
import functools
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import rounds
from benchmarks.hosting import keep_to_cpu
from benchmarks.peers.environments import EnvironmentFailure, prepare
from benchmarks.peers.processes import PeerFailure, PeerProcess
from benchmarks.peers.variants import PEERS, Peer
from benchmarks.subjects import PlainTensorFlow

_TRIALS = 3
"""Rounds with each setting; the first does not count."""

_CONVOLVED = 1e-2
"""How far another library's cnn may be off, of each tensor's norm: convolutions round
otherwise, some end on the other side of a ReLU or in another place of a pool, and
training goes on so."""

_PATIENCE, _PATIENCE_S = 5.0, 20.0
"""A setting is given up whose round takes so many times that of the fastest before it,
and so many seconds: two threads in PyTorch, where other processes want the cores too,
took minutes for what one did in seconds."""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("--workload", choices=("tiny", "mlp", "cnn"), default="tiny")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2, help="of ray_fed")
    parser.add_argument("--rounds", type=int, default=10, help="that count")
    parser.add_argument(
        "--peers", nargs="+", choices=tuple(PEERS), default=tuple(PEERS), metavar="PEER"
    )
    parser.add_argument(
        "--cache",
        type=pathlib.Path,
        default=pathlib.Path.home() / ".cache" / "ray_fed_peers",
        help="keeps the peers' environments, several GB",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        help="an interpreter that peers may be installed for; may be given again",
    )
    parser.add_argument(
        "--limit-s", type=float, default=600.0, help="for one answer of a peer"
    )
    parser.set_defaults(jit="auto")  # of ray_fed; peers have no such choice
    return parser.parse_args(arguments)


def write_task(name: str, num_clients: int, folder: pathlib.Path) -> None:
    """Write the data of all clients and the first weights, where peers read them."""
    from benchmarks.workloads import WORKLOADS

    workload = WORKLOADS[name]
    data = [workload.client(index) for index in range(num_clients)]
    for axis, column in zip("xy", zip(*data, strict=True), strict=True):
        np.save(folder / f"{axis}.npy", np.stack(column))
    np.savez(folder / "initial.npz", *workload.initial())


def choose_fastest(
    settings: Sequence[str], start: Callable[[str], PeerProcess]
) -> tuple[str, PeerProcess, dict[str, float | str]]:
    """Try all settings of a peer; return the fastest, its process, and what they took.

    Raises:
        PeerFailure: it runs with none of them.
    """
    tried: dict[str, float | str] = {}
    best: tuple[float, str, PeerProcess] | None = None
    for setting in settings:
        patience_s = math.inf if best is None else _PATIENCE_S + _PATIENCE * best[0]
        try:
            seconds, process = _try(start, setting, patience_s)
        except PeerFailure as failure:
            tried[setting] = str(failure)
            continue
        tried[setting] = seconds
        slower = process
        if best is None or seconds < best[0]:
            slower = None if best is None else best[2]
            best = (seconds, setting, process)
        if slower is not None:
            slower.close()
    if best is None:
        raise PeerFailure(f"{tried[settings[-1]]}")
    return best[1], best[2], tried


def _try(
    start: Callable[[str], PeerProcess], setting: str, patience_s: float
) -> tuple[float, PeerProcess]:
    """Return the least seconds of a round after the first, and the process."""
    process = start(setting)
    limit_s, process.limit_s = process.limit_s, min(process.limit_s, patience_s)
    try:
        seconds = min(process.turn(_TRIALS)[0][1:])
    except PeerFailure:
        process.close()
        raise
    process.limit_s = limit_s
    return seconds, process


def _start(
    options: argparse.Namespace, peer: Peer, python: pathlib.Path, folder: pathlib.Path
) -> Callable[[str], PeerProcess]:
    def start(setting: str) -> PeerProcess:
        settings = peer.settings[setting]
        told = {"workload": options.workload, "folder": str(folder)}
        command = [str(python), "-m", peer.module]
        return PeerProcess(
            [*command, json.dumps({**told, "settings": settings})],
            settings,
            pathlib.Path(tempfile.mkdtemp(dir=folder)) / "process",
            options.limit_s,
        )

    return start


def compare(
    options: argparse.Namespace,
    name: str,
    backends: dict[str, rounds.Turn],
    expected: Sequence[Any],
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Return the figures of one peer and ray_fed, in turns.

    Raises:
        EnvironmentFailure: the peer does not install.
        PeerFailure: it does not run, or computes something else.
    """
    peer = PEERS[name]
    python = prepare(peer.environment, options.cache, options.python)
    setting, process, tried = choose_fastest(
        list(peer.settings), _start(options, peer, python, folder)
    )
    with contextlib.closing(process):
        same = _agree_by_norm if options.workload == "cnn" else rounds.agree
        if not same(process.weights(), expected):
            raise PeerFailure("its weights after a round are not plain TensorFlow's")
        timed = rounds.take_turns({name: process.turn, **backends}, options.rounds)
    for backend in backends:
        if not rounds.agree(timed[backend].weights, expected):
            raise RuntimeError(
                f"Expected the weights of plain TensorFlow, `{backend}` differs."
            )
    figures = summarize(options.clients, name, timed)
    tried_rates = {
        k: v if isinstance(v, str) else round(options.clients / v, 2)
        for k, v in tried.items()
    }
    return {
        "version": process.version,
        "setting": setting,
        **figures,
        "tried_clients_per_s": tried_rates,
    }


def _agree_by_norm(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return rounds.agree(found, expected, _is_close_by_norm)


def _is_close_by_norm(found: Any, expected: Any) -> bool:
    distance = np.linalg.norm(np.subtract(found, expected))
    return bool(distance <= _CONVOLVED * np.linalg.norm(expected))


def summarize(
    num_clients: int, name: str, timed: dict[str, rounds.Timed]
) -> dict[str, Any]:
    """Return clients a second of all, and how many times the peer's that is."""
    medians = {who: of.median_s for who, of in timed.items()}
    return {
        "clients_per_s": {
            who: round(num_clients / median, 2) for who, median in medians.items()
        },
        "times_the_peer": {
            who: round(medians[name] / median, 2)
            for who, median in medians.items()
            if who != name
        },
    }


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run everything; return the figures, and what is wrong with ray_fed's."""
    cohort = (options.workload, options.clients)
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_task(*cohort, folder)
        with contextlib.closing(
            PlainTensorFlow(*cohort, options.workers, options.clients)
        ) as plain:
            _, expected = plain.run(jit_compile=False)
        hosts = rounds.start_backends(options, stack)
        for host in hosts.values():
            host.call(
                "prepare",
                label="cohort",
                of=cohort,
                num_distinct=options.clients,
                data="placed",
            )
        backends = rounds.turns_of(hosts, "cohort")
        one = functools.partial(compare, options)
        for name in options.peers:
            rounds.tell(f"{name} ...")
            try:
                figures[name] = one(name, backends, expected, folder)
                rounds.tell(json.dumps(figures[name]))
            except (EnvironmentFailure, PeerFailure) as failure:
                failed[name] = str(failure)
        facts = {backend: host.call("facts") for backend, host in hosts.items()}
    told = {k: vars(options)[k] for k in ("workload", "clients", "workers", "rounds")}
    wrong = rounds.check_kernels(facts)
    return {**told, "peers": figures, "failed": failed}, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    keep_to_cpu()
    figures, wrong = measure(options)
    print(json.dumps(figures))
    messages = [f"{name}: {why}" for name, why in figures["failed"].items()]
    for message in (*messages, *wrong):
        print(message, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
