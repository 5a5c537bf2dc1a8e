"""The pairs of computations that federated algorithms, and parts of them, are."""

# pyright: reportUnknownLambdaType=false

import dataclasses
from collections.abc import Mapping
from typing import Any

import federated_language as fl
import tensorflow as tf
from typing_extensions import override

from ray_fed import tensorflow as rtf
from ray_fed.learning.accounting import SampledGaussian, TreeGaussian
from ray_fed.observability import reprs


@dataclasses.dataclass(frozen=True, repr=False)
class LearningProcess:
    """A federated algorithm as two federated_language computations.

    Call them as functions, or give them to any context of federated_language.

    Attributes:
        initialize: ( -> state@SERVER).
        next: one round, from the state and all clients' data; what it returns is said
            where the process is built.
        privacy: what its rounds spend; None where they protect no client.
        initial_client_state: of a client that took part in no round yet, numpy arrays;
            None where clients have no state.
        num_clients: to choose cohorts from; None: it works with any number.
        facts: what it is, by name, such as its algorithm and model: shown, not read.
        model: that it trains, which `run` evaluates on its `validation_data`.
    """

    initialize: Any
    next: Any
    privacy: SampledGaussian | TreeGaussian | None = None
    initial_client_state: Any = None
    num_clients: int | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    model: Any = dataclasses.field(default=None, compare=False)

    @override
    def __repr__(self) -> str:
        if not self.facts:
            return f"<learning process: {_describe(self)}>"
        facts = ", ".join(f"{name} {fact}" for name, fact in self.facts.items())
        return f"<learning process: {reprs.shorten(facts, 240)}>"

    def _repr_html_(self) -> str:
        named = {"initialize": self.initialize, "next": self.next}
        types = {name: reprs.shorten(_type_of(comp)) for name, comp in named.items()}
        return reprs.draw_facts("learning process", {**self.facts, **types})


@dataclasses.dataclass(frozen=True, repr=False)
class Part:
    """A part of a learning process: a smaller pair of computations, with a state.

    Attributes:
        initialize: ( -> S@SERVER); S may be the empty struct.
        next: takes S@SERVER first and returns it first; `build_process` says the rest.
        initial_client_state: of clients' work that keeps something between rounds: what
            a client begins with, numpy arrays.
        privacy: of an aggregation: what each round spends; None where it protects no
            client.
        counts_empty_rounds: of an aggregation: whether a round without any example is a
            round like others, as where its noise hides that nobody was there.
        num_clients: to choose cohorts from; None: it works with any number.
    """

    initialize: Any
    next: Any
    initial_client_state: Any = None
    privacy: SampledGaussian | TreeGaussian | None = None
    counts_empty_rounds: bool = False
    num_clients: int | None = None

    @override
    def __repr__(self) -> str:
        return f"<part of a learning process: {_describe(self)}>"


def build_constants(values: Any) -> Any:
    """Return the computation ( -> S) of values, or of what a function makes of tensors.

    Args:
        values: a structure of numbers and arrays; or a function that returns one of
            these and of tensors, which is traced.
    """

    @rtf.computation
    def make() -> Any:
        made = values() if callable(values) else values
        return tf.nest.map_structure(
            lambda value: value if tf.is_tensor(value) else tf.constant(value), made
        )

    return make


def build_initialize(values: Any) -> Any:
    """Return the computation ( -> S@SERVER) of `build_constants`."""
    make = build_constants(values)

    @fl.federated_computation
    def initialize() -> Any:
        return fl.federated_eval(make, fl.SERVER)

    return initialize


def with_facts(process: LearningProcess, **facts: object) -> LearningProcess:
    """Return a process that says more of what it is, before what it says already.

    Args:
        process: of an algorithm.
        **facts: by name, with `_` for a space; None is left out.
    """
    known = {k.replace("_", " "): str(v) for k, v in facts.items() if v is not None}
    return dataclasses.replace(process, facts={**known, **process.facts})


def _describe(pair: LearningProcess | Part) -> str:
    named = {"initialize": pair.initialize, "next": pair.next}
    types = (f"{name} {reprs.shorten(_type_of(comp))}" for name, comp in named.items())
    return "; ".join(types)


def _type_of(comp: Any) -> str:
    return str(getattr(comp, "type_signature", comp))
