"""Client work that needs tf.data says so: an event a round, and the report."""

# pyright: reportUnknownLambdaType=false

from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.observability import events
from tests.fixtures import EACH_BACKEND, ContextFactory, Seen, report_of

SEQUENCE = fl.SequenceType(np.int32)
CLIENTS = [[1, 2], [3], []]


@rtf.computation(SEQUENCE)
def summed(ds: Any) -> Any:
    return ds.batch(2).reduce(0, lambda s, x: s + tf.reduce_sum(x))


@rtf.computation(SEQUENCE)
def flattened(ds: Any) -> Any:
    ds = ds.flat_map(tf.data.Dataset.from_tensors)
    return ds.reduce(0, lambda s, x: s + x)


def total_of(work: Any) -> Any:
    @fl.federated_computation(fl.FederatedType(SEQUENCE, fl.CLIENTS))
    def total(data: Any) -> Any:
        return fl.federated_sum(fl.federated_map(work, data))

    return total


SETTINGS = {"workers": 2, "subrounds": 2}
"""Of what `build` builds."""


@EACH_BACKEND
def test_reasons_are_told_once_a_round(build: ContextFactory) -> None:
    context, seen = build(), Seen()
    context.subscribe(seen)

    totals = [context.invoke(total_of(work), CLIENTS) for work in (flattened, summed)]
    lowered = report_of(context)
    context.invoke(total_of(flattened), CLIENTS)
    unlowered = report_of(context)
    told = [e for e in seen if isinstance(e, events.ComputationUnlowered)]

    assert totals == [6, 6]
    assert [(event.round_index, event.reason) for event in told] == [
        (0, "FlatMapDataset"),
        (2, "FlatMapDataset"),
    ]
    name = told[0].computation
    assert name.startswith("the computation `flattened` (test_unlowered.py:")
    assert lowered.unlowered == ()
    assert unlowered.unlowered == (f"{name}: FlatMapDataset",)
