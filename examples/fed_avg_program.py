"""Federated averaging as a federated program: stopped anywhere, it goes on.

python examples/fed_avg_program.py states              thirty rounds, saved in states/
python examples/fed_avg_program.py states local 10     on a Ray of its own, ten rounds

The model stays in Ray's object store from round to round. It comes to this process in
every fifth one, to be saved; metrics come in each. Run it again after Ctrl-C, or after
worse, and it goes on at the round that was saved last, to the same weights.
"""

# ray_fed comes first: it keeps TensorFlow's start-up lines off the screen.
# ruff: noqa: I001
import asyncio
import sys
from typing import Any

import ray_fed
from ray_fed import learning
from ray_fed.program import FileProgramStateManager, RayFederatedContext

import federated_language as fl
import keras
from typing_extensions import override

from fed_avg_digits import COHORT_SIZE, SEED, build_model, load_clients

SAVE_EVERY = 5


class Printer(fl.program.ReleaseManager[Any, int]):
    """Releases metrics to the screen."""

    @override
    async def release(self, value: Any, key: int) -> None:
        """Read the metrics of a round, and print them."""
        metrics: Any = await fl.program.materialize_value(value)
        print(
            f"round {key + 1}: training loss {metrics['loss']:.4f},"
            f" accuracy {metrics['accuracy']:.4f}"
        )


async def run(context: RayFederatedContext, folder: str, num_rounds: int) -> Any:
    """Train from the last saved round on; return the server's state, here."""
    clients, _ = load_clients()
    training = learning.build_fed_avg(
        build_model(), keras.optimizers.SGD(0.4), keras.optimizers.SGD(1.0)
    )
    cohorts = learning.CohortSampler(len(clients), COHORT_SIZE, SEED)
    manager, printer = FileProgramStateManager(folder), Printer()
    state = context.invoke(training.initialize)
    saved, done = await manager.load_latest((state, 0))
    if saved is not None:
        state, num_invocations = saved
        context.resume_at(num_invocations)
        print(f"going on after round {done}")
    for round_index in range(done, num_rounds):
        data = [clients[index] for index in cohorts.sample(round_index)]
        state, metrics = context.invoke(training.next, (state, data))
        await printer.release(metrics, round_index)
        if (round_index + 1) % SAVE_EVERY == 0:
            await manager.save((state, context.num_invocations), round_index + 1)
    return await fl.program.materialize_value(state)


def main(folder: str, address: str | None = None, num_rounds: str = "30") -> None:
    """Train, with a line a round, and say what came of it."""
    with ray_fed.init(address) as rounds, RayFederatedContext(rounds) as context:
        state = asyncio.run(run(context, folder, int(num_rounds)))
        print(f"{int(state.round_index)} rounds in all")


if __name__ == "__main__":
    main(*sys.argv[1:])
