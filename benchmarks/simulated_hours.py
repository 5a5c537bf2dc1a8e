"""Simulated hours until MNIST has a fixed accuracy, by three schedules.

    python -m benchmarks.simulated_hours --data mnist --picture simulated-hours.png

All runs train the 2NN of federated averaging on the same 100 clients, whose devices
differ by a log-normal speed. Prints a table in Markdown. Progress goes to standard
error.

The column "busy" is the share of time in which the workers of this machine read
clients' data, did their work, merged or evaluated. The time of all workers counts,
from the beginning of the run's first call to the end of its last. This column and the
seconds are measured. The others are the same on every machine.
"""

import argparse
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import federated_language as fl
import keras

import ray_fed
from benchmarks.papers import fed_avg, mnist, trials
from ray_fed import learning
from ray_fed.observability import events
from ray_fed.observability.timeline import new_figure

TARGET, MOST_UPDATES = 0.97, 10_000
COHORT_SIZE, BUFFER, RATE = 20, 10, 0.1
DEVICES = learning.devices.Devices(
    seconds_per_example=learning.devices.LogNormal(median=0.1, sigma=1.0, seed=1),
    download=1_000_000.0,
    upload=200_000.0,
    drop_out=0.05,
)
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {"cohort_size": COHORT_SIZE},
    "over-selected": {
        "cohort_size": COHORT_SIZE,
        "schedule": learning.Synchronous(over_selection=1.3),
    },
    "buffered": {"schedule": learning.Buffered(COHORT_SIZE, BUFFER)},
}
"""The arguments of `learning.run`, by the name of the schedule."""


class BusyShare:
    """An event sink that measures how long the workers of a context work.

    Args:
        num_workers: The number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._begun = self._ended = self._work_s = 0.0

    @property
    def value(self) -> float:
        """The share of the workers' time, from 0 to 1."""
        return self._work_s / (self._num_workers * (self._ended - self._begun))

    def on_event(self, event: events.Event) -> None:
        """Add the work of a subround, or note when a call began or ended."""
        match event:
            case events.RoundStarted():
                self._begun = self._begun or time.monotonic()
            case events.SubroundFinished():
                self._work_s += event.busy_s
            case events.RoundFinished():
                self._ended = time.monotonic()
            case _:
                pass


def compare(
    data: pathlib.Path | None, backend: Any, num_workers: int, target: float = TARGET
) -> tuple[list[trials.Row], dict[str, learning.History]]:
    """Run each schedule until the target, and return a row and a history for each.

    Args:
        data: The folder of MNIST's files. None: Keras downloads them.
        backend: "local" or "ray". Each run has a context of its own.
        num_workers: The number of workers of each context.
        target: The accuracy on the test images at which a run ends.
    """
    config = ray_fed.Config.load(backend=backend, workers=num_workers)
    address = "local" if backend == "ray" else None
    train, test = mnist.load_mnist(data)
    owners = trials.find_owners(fed_avg.divide(train.y, "iid"))
    clients = trials.build_clients(owners, train.x, train.y)
    process = learning.build_fed_avg(fed_avg.build_model(), keras.optimizers.SGD(RATE))
    rows: list[trials.Row] = []
    histories: dict[str, learning.History] = {}

    def has_reached(history: learning.History) -> bool:
        return max(trials.read_accuracies(history), default=0.0) >= target

    for name, arguments in SCHEDULES.items():
        num_updates = arguments.get("cohort_size", BUFFER)
        busy = BusyShare(num_workers)
        with ray_fed.create_context(config, address=address) as context:
            fl.framework.set_default_context(context)
            context.subscribe(busy)
            history = learning.run(
                process,
                clients.shuffle().batch(fed_avg.BATCH_SIZE),
                num_rounds=MOST_UPDATES // num_updates,
                validation_data=test.batch(1000),
                # All schedules are looked at after the same number of updates.
                evaluate_every=COHORT_SIZE // num_updates,
                stop=has_reached,
                devices=DEVICES,
                progress=True,
                **arguments,
            ).history
        histories[name] = history
        rows.append(describe(name, history, target) | {"busy": f"{busy.value:.2f}"})
    return rows, histories


def describe(name: str, history: learning.History, target: float) -> trials.Row:
    """Return the row of a run."""
    last = history[-1]
    has_reached = trials.read_accuracies(history)[-1] >= target
    wasted_s = sum(record.wasted_seconds for record in history)
    return {
        "schedule": name,
        "rounds": f"{last.round}",
        "updates": f"{sum(len(record.clients) for record in history):,}",
        f"hours to {target:.0%}": f"{read_hours(last):.2f}" if has_reached else "never",
        "wasted hours of clients": f"{wasted_s / 3600:.1f}",
        "seconds": f"{sum(record.seconds for record in history):.1f}",
    }


def read_hours(record: learning.RoundRecord) -> float:
    """Return the simulated hours of a run after a round."""
    return (record.simulated_time or 0.0) / 3600


def draw(histories: Mapping[str, learning.History], target: float = TARGET) -> Any:
    """Return a matplotlib figure of accuracies over simulated hours."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for name, history in histories.items():
        evaluated = [record for record in history if record.evaluation is not None]
        hours = [read_hours(record) for record in evaluated]
        axes.plot(hours, trials.read_accuracies(history), label=name, marker=".")
    axes.axhline(target, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="simulated hours", ylabel="accuracy on the test images")
    axes.set_ylim(bottom=max(0.0, target - 0.1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def main() -> None:
    """Compare the schedules, print the table and save the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=pathlib.Path, help="the folder with MNIST")
    parser.add_argument("--picture", type=pathlib.Path, help="the PNG file to write")
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    rows, histories = compare(given.data, given.backend, given.workers)
    print(trials.draw_table(rows))
    if given.picture is not None:
        draw(histories).savefig(given.picture, dpi=100)


if __name__ == "__main__":
    main()
