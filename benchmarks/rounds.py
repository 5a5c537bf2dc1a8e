"""Times rounds of ray_fed and of other programs, and prints one line of JSON.

    python -m benchmarks.rounds --workload tiny --clients 1000 --workers 2

    local, ray                    README's program: a Keras model through `learning.run`
    local_by_hand, ray_by_hand    the same arithmetic as a federated computation
    plain, plain_xla              a TensorFlow loop over all clients in one graph
    keras                         a loop over `train_on_batch`

Plain TensorFlow has as many processes of one thread as there are workers. Its data are
tensors before the rounds, and ray_fed's data are where its workers keep them. The
programs take turns of five rounds after two to warm up. Rounds of ten clients show the
fixed cost of a round. The command fails if results differ, or if the interpreter ran
leaves.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from benchmarks.hosting import Hosted, MemoryWatch, keep_to_cpu, read_status
from benchmarks.subjects import Backend, KerasLoop, PlainTensorFlow

_WARM_UP = 2
"""Rounds at the beginning of a turn that do not count."""

_IN_A_ROW = 5
"""Rounds of a turn that count."""

_BACKENDS = ("local", "ray")

_FORMS = ("", "_by_hand")
"""Ends of the labels of programs: README's program, and the computation by hand."""

_WORKLOADS = ("tiny", "mlp", "cnn", "mlp_mixed", "cnn_mixed")

_FIXED = ("tiny", 10)
"""Workload and clients of the rounds that show what a round itself costs."""

_XLA_LIMIT = 8.0
"""XLA that takes so many times longer on one client takes no part in the rounds: on a
CPU, cnn takes minutes."""

_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""Sums of thousands of clients, in another order, of numbers below one."""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds")
    parser.add_argument("--workload", choices=_WORKLOADS, default="tiny")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="that count")
    parser.add_argument(
        "--distinct",
        type=int,
        default=None,
        help="client i has the data of i mod this (default: each has its own)",
    )
    parser.add_argument(
        "--data",
        choices=("placed", "lists"),
        default="placed",
        help="placed on ray_fed's workers, or the same lists in each round",
    )
    parser.add_argument(
        "--no-keras",
        action="store_true",
        help="leave out the Keras loop, which takes longest",
    )
    parser.add_argument(
        "--jit",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether XLA compiles ray_fed's client work: by its rule, or as told",
    )
    return parser.parse_args(arguments)


def _choose_plain(
    plain: PlainTensorFlow, workload: str
) -> tuple[dict[str, bool], dict[str, float]]:
    """Return which forms to time, with XLA or not, and what one client took."""
    forms = {"plain": False, "plain_xla": True}
    if workload.endswith("_mixed"):  # XLA has no batches of a size that changes
        del forms["plain_xla"]
    seconds: dict[str, float] = {}
    for name, jit in forms.items():
        runs = [plain.run(jit_compile=jit, num_clients=1)[0] for _ in range(4)]
        seconds[name] = min(runs[1:])
    if seconds.get("plain_xla", 0.0) > _XLA_LIMIT * seconds["plain"]:
        del forms["plain_xla"]
    return forms, seconds


@dataclasses.dataclass(frozen=True)
class Timed:
    """Rounds of one program that took turns with others.

    Attributes:
        seconds: The time of each round that counts.
        weights: The result of the last turn.
    """

    seconds: list[float]
    weights: list[Any]

    @property
    def median_s(self) -> float:
        """The median of the rounds that count."""
        return statistics.median(self.seconds)


Turn: TypeAlias = Callable[[int], tuple[list[float], Any]]
"""From a number of rounds to the seconds of each, and the weights of the last."""


def one_by_one(run: Callable[[], tuple[float, Any]]) -> Turn:
    """Return turns of one that is asked for each of its rounds.

    Args:
        run: returns the seconds of a round, and its weights.
    """

    def turn(num_rounds: int) -> tuple[list[float], Any]:
        seconds, weights = zip(*(run() for _ in range(num_rounds)), strict=True)
        return list(seconds), weights[-1]

    return turn


def take_turns(turns: Mapping[str, Turn], num_rounds: int) -> dict[str, Timed]:
    """Return the rounds of all, by name.

    Args:
        turns: by name.
        num_rounds: that count.
    """
    timed: dict[str, Timed] = {}
    for begun in range(0, num_rounds, _IN_A_ROW):
        count = min(_IN_A_ROW, num_rounds - begun)
        for name, turn in turns.items():
            seconds, weights = turn(_WARM_UP + count)
            before = timed[name].seconds if name in timed else []
            timed[name] = Timed([*before, *seconds[_WARM_UP:]], weights)
    return timed


def _is_close(found: Any, expected: Any) -> bool:
    """Return whether a tensor is the same up to the order of sums."""
    return np.allclose(found, expected, _RELATIVE, _ABSOLUTE)


def agree(
    found: Sequence[Any],
    expected: Sequence[Any],
    is_close: Callable[[Any, Any], bool] = _is_close,
) -> bool:
    """Return whether weights are of the same shapes, and each close to the other."""
    return len(found) == len(expected) and all(
        np.shape(a) == np.shape(b) and is_close(a, b)
        for a, b in zip(found, expected, strict=True)
    )


def check_results(
    results: Mapping[str, Sequence[Any]], *, same_bits: bool = True
) -> list[str]:
    """Return what is wrong with the results, in words.

    Args:
        results: weights, by who computed them.
        same_bits: whether those of `local` and `ray` are to be equal.
    """
    wrong: list[str] = []
    expected = results["plain"]
    for name, found in results.items():
        if not agree(found, expected):
            wrong.append(f"Expected the weights of plain TensorFlow, `{name}` differs.")
    for form in _FORMS if same_bits else ():
        local, ray = (results.get(f"{backend}{form}", ()) for backend in _BACKENDS)
        if local and ray and not all(map(np.array_equal, local, ray)):
            wrong.append(
                f"Expected the same bits of `local{form}` and `ray{form}`, they differ."
            )
    return wrong


def tell(doing: str) -> None:
    """Say on standard error what a command is at."""
    print(doing, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run everything; return the figures, and what is wrong."""
    distinct = options.distinct or options.clients
    cohort = (options.workload, options.clients)
    with contextlib.ExitStack() as stack:
        tell("start of all processes ...")
        plain = PlainTensorFlow(*cohort, options.workers, distinct)
        stack.callback(plain.close)
        keras = None
        if not options.no_keras:
            keras = Hosted(KerasLoop, *cohort, options.workers, distinct)
            stack.callback(keras.close)
            keras.receive()
        hosts = start_backends(options, stack)
        first_result_s: dict[str, float] = {}
        for backend, host in hosts.items():
            for form in _FORMS:
                for label, of in (("cohort", cohort), ("fixed", _FIXED)):
                    seconds = host.call(
                        "prepare",
                        label=label + form,
                        of=of,
                        num_distinct=distinct,
                        data=options.data,
                    )
                    if label == "cohort":
                        first_result_s[backend + form] = round(seconds, 3)
        forms, one_client_s = _choose_plain(plain, options.workload)
        turns = {
            name: one_by_one(functools.partial(plain.run, jit_compile=jit))
            for name, jit in forms.items()
        }
        watches = {backend: MemoryWatch(host.pid) for backend, host in hosts.items()}
        for watch in watches.values():
            stack.enter_context(watch)
        for form in _FORMS:
            turns |= turns_of(hosts, "cohort", form)
        if keras is not None:
            turns["keras"] = one_by_one(functools.partial(keras.call, "run"))
        tell(f"rounds of {options.clients} clients: {', '.join(turns)} ...")
        cohorts = take_turns(turns, options.rounds)
        tell(f"rounds of {_FIXED[1]} clients ...")
        fixed: dict[str, Timed] = {}
        for form in _FORMS:
            for name, turn in turns_of(hosts, "fixed", form).items():
                fixed |= take_turns({name: turn}, options.rounds)
        facts = {backend: host.call("facts") for backend, host in hosts.items()}
        memory = _describe_memory(hosts, watches)
        memory["plain"] = {"worker_peak_mb": plain.peak_mb()}
    for backend, told in facts.items():
        memory[backend]["worker_peak_mb"] = told.pop("worker_peak_mb")
    decisions = [told["xla"] for told in facts.values()]
    same_bits = decisions.count(decisions[0]) == len(decisions)
    results = {name: timed.weights for name, timed in cohorts.items()}
    wrong = check_results(results, same_bits=same_bits) + check_kernels(facts)
    figures = summarize(options.clients, cohorts, fixed)
    figures["first_result_s"] = first_result_s
    figures["one_client_s"] = {k: round(v, 5) for k, v in one_client_s.items()}
    return {**vars(options), **figures, "memory": memory, "kernels": facts}, wrong


def start_backends(
    options: argparse.Namespace, stack: contextlib.ExitStack
) -> dict[str, Hosted]:
    """Return ray_fed's backends, each in a process that the stack ends."""
    hosts: dict[str, Hosted] = {}
    for backend in _BACKENDS:
        host = Hosted(Backend, backend, options.workers, options.jit)
        hosts[backend] = host
        stack.callback(host.close)
        host.receive()
    return hosts


def turns_of(hosts: dict[str, Hosted], label: str, form: str = "") -> dict[str, Turn]:
    """Return turns of each backend, for the program of `label` and one of `_FORMS`."""

    def turns(host: Hosted) -> Turn:
        program = label + form
        return lambda num_rounds: host.call("run", label=program, num_rounds=num_rounds)

    return {backend + form: turns(host) for backend, host in hosts.items()}


def _describe_memory(
    hosts: dict[str, Hosted], watches: dict[str, MemoryWatch]
) -> dict[str, dict[str, Any]]:
    return {
        backend: {
            "driver_peak_mb": read_status(hosts[backend].pid, "VmHWM"),
            "driver_growth_mb": round(watch.peak - watch.before, 1),
        }
        for backend, watch in watches.items()
    }


def check_kernels(facts: dict[str, dict[str, Any]]) -> list[str]:
    """Return which backends interpreted what a kernel should have run, in words."""
    return [
        f"Expected kernels to run all leaves on `{backend}`, found"
        f" {told['interpreted_leaves']} interpreted: {', '.join(told['reasons'])}."
        for backend, told in facts.items()
        if told["interpreted_leaves"]
    ]


def summarize(
    num_clients: int, cohorts: Mapping[str, Timed], fixed: Mapping[str, Timed]
) -> dict[str, Any]:
    """Return the figures of these rounds.

    Args:
        num_clients: of a round of `cohorts`.
        cohorts: rounds by who ran them.
        fixed: the same, of rounds that are small.
    """
    rates = {name: num_clients / timed.median_s for name, timed in cohorts.items()}
    best = max(rate for name, rate in rates.items() if name.startswith("plain"))
    return {
        "clients_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "ratio_to_plain": {
            name: round(rate / best, 3)
            for name, rate in rates.items()
            if not name.startswith("plain")
        },
        "ratio_to_by_hand": {
            name: round(rates[name] / rates[f"{name}_by_hand"], 3)
            for name in _BACKENDS
            if f"{name}_by_hand" in rates
        },
        "fixed_ms": {
            name: round(1000 * timed.median_s, 2) for name, timed in fixed.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    keep_to_cpu()
    figures, wrong = measure(options)
    print(json.dumps(figures))
    for message in wrong:
        print(message, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
