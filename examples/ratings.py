"""Ratings in one table with a column for the client: a model of two inputs learns them.

The example writes the table itself: people with a taste rate films with a character, in
a parquet file that is sorted by person. A person's rows are read where they are needed.

python examples/ratings.py                 joins your Ray, or starts one
python examples/ratings.py local 5 100     a Ray of its own, five rounds, 100 people
"""

# ray_fed comes first: it keeps TensorFlow's start-up lines off the screen.
# ruff: noqa: I001
import pathlib
import sys
import tempfile

import ray_fed
from ray_fed import learning
from ray_fed.data import ClientData

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_FILMS, NUM_GROUPS, COHORT_SIZE, SEED = 200, 8, 50, 0


def write_table(path: pathlib.Path, num_people: int) -> None:
    """Write who rated which film how: log-normal numbers of ratings a person."""
    rng = np.random.default_rng(SEED)
    counts = np.ceil(rng.lognormal(2.5, 1.0, num_people)).astype(int)
    person = np.repeat(np.arange(num_people), counts)
    film = rng.integers(0, NUM_FILMS, len(person))
    group = person % NUM_GROUPS  # people of a group have one taste
    tastes = rng.normal(size=(NUM_GROUPS, 3))
    characters = rng.normal(size=(NUM_FILMS, 3))
    liked = (tastes[group] * characters[film]).sum(axis=1)
    table = {
        "person": [f"person {index:05}" for index in person],
        "group": group.astype(np.int32),
        "film": film.astype(np.int32),
        "rating": (liked + 0.1 * rng.normal(size=len(person))).astype(np.float32),
    }
    pq.write_table(pa.table(table), path, row_group_size=2048)


def build_model() -> learning.Model:
    """Return a model of a group and a film: the product of what it knows of both."""
    keras.utils.set_random_seed(SEED)
    group = keras.Input((), dtype="int32", name="group")
    film = keras.Input((), dtype="int32", name="film")
    of_group = keras.layers.Embedding(NUM_GROUPS, 3, "normal")(group)
    of_film = keras.layers.Embedding(NUM_FILMS, 3, "normal")(film)
    product = keras.layers.Dot(axes=1)([of_group, of_film])
    return learning.Model.from_keras(
        keras.Model({"group": group, "film": film}, product),
        loss="mse",
        metrics=["mae"],
    )


class Show:
    """Prints what each round came to."""

    def on_round(self, record: learning.RoundRecord) -> None:
        """Print the numbers of a round."""
        numbers = record.evaluation or {}
        print(
            f"round {record.round}: mean squared error"
            f" {numbers['loss']:.3f}, {record.seconds:.2f} s"
        )


def main(
    address: str | None = None, num_rounds: str = "30", num_people: str = "1000"
) -> None:
    """Train, and print the error of people who took no part."""
    with ray_fed.init(address or None), tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "ratings.parquet"
        write_table(path, int(num_people))
        data = ClientData.from_parquet(
            path, client="person", x={"group": "group", "film": "film"}, y="rating"
        )
        people, held_out = data.hold_out_clients(0.1, seed=SEED)
        clients = people.shuffle().epochs(2).batch(8)
        tests = held_out.batch(64)
        print(f"{len(people)} people train, {len(held_out)} are held out")

        model = build_model()
        training = learning.build_fed_avg(
            model,
            client_optimizer=keras.optimizers.SGD(0.5),
            server_optimizer=keras.optimizers.Adam(0.1),
        )
        evaluation = learning.build_fed_eval(model, training)

        learning.run(
            training,
            clients,
            num_rounds=int(num_rounds),
            cohort_size=min(COHORT_SIZE, len(clients)),
            seed=SEED,
            evaluate=lambda state: evaluation.next(state, tests),
            callbacks=[Show()],
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
