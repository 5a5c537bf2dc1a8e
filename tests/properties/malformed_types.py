"""Types that computations and data may have, or may not."""

# pyright: reportUnknownLambdaType=false

import collections
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

from ray_fed import tensorflow as rtf
from tests.properties.malformed import REFUSED, Case, Place, Right
from tests.properties.malformed_arguments import Mute, cycle, nested

RIGHT_TYPES: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: np.int32, "int32"),
    (lambda: tf.float32, "float32"),
    (lambda: tf.string, "str"),
    (lambda: (np.int64, [2, None]), "int64[2,?]"),
    (lambda: tf.TensorSpec([None], tf.bool), "bool[?]"),
    (lambda: fl.TensorType(np.float64, [0]), "float64[0]"),
    (lambda: [("x", np.int32), ("y", np.str_)], "<x=int32,y=str>"),
    (lambda: fl.SequenceType(np.int32), "int32*"),
    (lambda: tf.data.DatasetSpec(tf.TensorSpec([3], tf.int32)), "int32[3]*"),
)
WRONG_TYPES: Mapping[str, Callable[[], Any]] = {
    "variant": lambda: tf.variant,
    "resource": lambda: tf.resource,
    "variant tensor": lambda: tf.TensorSpec([], tf.variant),
    "quantised": lambda: tf.qint8,
    "date": lambda: np.datetime64,
    "void": lambda: np.void,
    "object": lambda: np.object_,
    "word": lambda: "nope",
    "number": lambda: 3,
    "float": lambda: 2.5,
    "ellipsis": lambda: ...,
    "class": lambda: Mute,
    "negative size": lambda: (np.int32, [-1]),
    "sizes": lambda: (np.int32, [-5, -2]),
    "negative tensor": lambda: fl.TensorType(np.int32, [-3]),
    "size of a half": lambda: (np.int32, [1.5]),
    "size of truth": lambda: (np.int32, [True]),
    "size in words": lambda: (np.int32, ["a"]),
    "size of 2**70": lambda: (np.int32, [2**70]),
    "size of 10**25": lambda: fl.TensorType(np.int32, [10**25]),
    "very many": lambda: (np.int32, [2**40, 2**40]),
    "very deep": lambda: nested(1_000, np.int32),
    "deeper": lambda: nested(100_000, np.int32),
    "too deep for protobuf": lambda: nested(80, np.int32),
    "cycle": cycle,
    "surrogate as a name": lambda: [("\ud800", np.int32)],
    "two of one name": lambda: [("a", np.int32), ("a", np.int32)],
    "number as a name": lambda: {1: np.int32},
    "NUL": lambda: [("a\0", object)],
    "ragged": lambda: tf.RaggedTensorSpec([None, None]),
    "sparse": tf.SparseTensorSpec,
    "function": lambda: fl.FunctionType(np.int32, np.int32),
    "placed": lambda: fl.FederatedType(np.int32, fl.CLIENTS),
    "sequence of sequences": lambda: fl.SequenceType(fl.SequenceType(np.int32)),
    "placement": fl.PlacementType,
    "hostile": Mute,
    "set": lambda: {np.int32},
}


def types(generator: random.Random, place: Place) -> Iterator[Case]:
    """Yield computations and data of types that may be none."""
    del place
    while True:
        wrap, shown = generator.choice(WRAPPERS)
        declare, is_data = generator.choice(DECLARERS)
        if generator.random() < 0.2:
            make, text = generator.choice(RIGHT_TYPES)
            if text.endswith("*") and "*" in shown:
                continue
            label, expected = f"right: {text}", Right(shown.format(text))
        else:
            label, make = generator.choice(list(WRONG_TYPES.items()))
            expected = REFUSED
        run = lambda declare=declare, wrap=wrap, make=make: declare(wrap(make()))  # noqa: E731
        yield Case("type", f"{shown.format(label)}, data: {is_data}", run, expected)


WRAPPERS: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (lambda spec: spec, "{}"),
    (lambda spec: [("k", spec)], "<k={}>"),
    (lambda spec: collections.OrderedDict(p=np.int32, q=spec), "<p=int32,q={}>"),
)


def _declare_computation(spec: Any) -> str:
    comp = rtf.computation(lambda x: x, spec)
    return comp.type_signature.parameter.compact_representation()


def _declare_data(spec: Any) -> str:
    return rtf.data("a.npz", spec).type_signature.compact_representation()


DECLARERS = ((_declare_computation, False), (_declare_data, True))
