"""Programs of a user's, each with a mistake: `BEGINNING` comes before each."""

BEGINNING = """\
from ray_fed import learning
from ray_fed import tensorflow as rtf
from ray_fed.program import ClientData

import federated_language as fl
import keras
import numpy as np
import pandas as pd
import tensorflow as tf

generator = np.random.default_rng(0)


def make_model(*layers, metrics=()):
    keras.utils.set_random_seed(0)
    return learning.Model.from_keras(
        keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)]),
        loss="mse",
        metrics=list(metrics),
    )


def train(model, clients, **options):
    process = learning.build_fed_avg(model, client_optimizer=keras.optimizers.SGD(0.1))
    return learning.run(process, clients, num_rounds=2, progress=False, **options)


def make_client(seed, columns=4):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(8, columns)).astype(np.float32)
    return [{"x": x, "y": x.sum(axis=1)}]


clients = [make_client(seed) for seed in range(4)]
"""

PROGRAMS = {
    "a cell that is NaN": """
values = generator.normal(size=(40, 5)).astype(np.float32)
table = pd.DataFrame(values, columns=list("abcdy"))
table["hospital"] = np.repeat(["north", "south", "east", "west"], 10)
table.loc[13, "c"] = np.nan
data = ClientData.from_table(
    table,
    client="hospital",
    x=list("abcd"),
    y="y",
    missing="keep",
    dtypes={"c": np.float32},
).batch(5)
result = train(make_model(), data)
""",
    "a loader": """
def load_client(name):
    if name == "south":
        raise FileNotFoundError(f"no folder for {name}")
    return make_client(len(name))


model = make_model()
member = model.data_type.member
data = ClientData.from_function(["north", "south", "east"], load_client, member)
result = train(model, data)
""",
    "a Python function": """
def parse(x):
    value = x.numpy()
    if value > 2:
        raise ValueError(f"cannot parse {value}")
    return value * 2


@rtf.computation(np.float32)
def double(x):
    result = tf.py_function(parse, [x], tf.float32)
    return tf.ensure_shape(result, [])


@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def double_all(values):
    return fl.federated_sum(fl.federated_map(double, values))


double_all([1.0, 2.0, 3.0])
""",
    "a layer": """
class Scaled(keras.layers.Layer):
    def call(self, inputs):
        smallest = tf.reduce_min(inputs)
        tf.debugging.assert_greater(smallest, -1e-6, "inputs are below zero")
        return inputs / smallest


result = train(make_model(Scaled()), clients)
""",
    "another shape": """
result = train(make_model(), [*clients[:2], make_client(5, columns=3)])
""",
    "another dtype": """
wrong = [{"x": clients[0][0]["x"].astype(np.complex64), "y": clients[0][0]["y"]}]
result = train(make_model(), [*clients[:2], wrong])
""",
    "an evaluation": """
def evaluate(state):
    scores = {"loss": 1.0}
    return {"accuracy": scores["accuracy"]}


result = train(make_model(), clients, evaluate=evaluate)
""",
    "a metric": """
def closeness(labels, predictions):
    close = tf.reshape(labels - predictions, [-1, 3])
    return tf.reduce_sum(close, axis=1)


model = make_model(metrics=[closeness])
result = train(model, clients)
""",
    "an unknown column": """
values = generator.normal(size=(40, 3)).astype(np.float32)
table = pd.DataFrame(values, columns=["age", "dose", "y"])
table["hospital"] = np.repeat(["north", "south", "east", "west"], 10)
data = ClientData.from_table(table, client="hospital", x=["age", "dosis"], y="y")
""",
}
