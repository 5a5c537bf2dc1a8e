"""Selection and secure sums through compiled forms, and on the debugging stack."""

import logging
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import framework
from ray_fed import tensorflow as rtf
from tests.fixtures import ContextFactory

flf = fl.framework
Invoke = Callable[[Any, Any], Any]

INTEGERS = fl.FederatedType(np.int32, fl.CLIENTS)


@rtf.computation(np.int32)
def to_pair(x: Any) -> Any:
    return tf.stack([x, x])


@rtf.computation(np.float32, np.int32)
def scale(factor: Any, key: Any) -> Any:
    return factor * tf.cast(key, tf.float32)


@fl.federated_computation(INTEGERS)
def sum_of_at_most_ten(values: Any) -> Any:
    return fl.federated_secure_sum(values, 10)


@fl.federated_computation(INTEGERS)
def sum_of_pairs(values: Any) -> Any:
    return fl.federated_secure_sum(fl.federated_zip([values, values]), 10)


@fl.federated_computation(INTEGERS)
def sum_of_four_bits(values: Any) -> Any:
    return fl.federated_secure_sum_bitwidth(values, 4)


@pytest.mark.claim("semantics.56", "semantics.57")
@pytest.mark.parametrize(
    ("comp", "expected"),
    [
        pytest.param(sum_of_at_most_ten, 6, id="one bound"),
        pytest.param(sum_of_pairs, [6, 6], id="a bound for each tensor"),
        pytest.param(sum_of_four_bits, 6, id="bitwidth"),
    ],
)
def test_secure_sum_is_the_sum(invoke: Invoke, comp: Any, expected: Any) -> None:
    assert invoke(comp, [1, 2, 3]) == expected


@pytest.mark.claim("semantics.59")
@pytest.mark.parametrize(
    ("comp", "values"),
    [
        pytest.param(sum_of_at_most_ten, [1, 2, 11], id="above the maximum"),
        pytest.param(sum_of_four_bits, [1, 2, 16], id="too many bits"),
        pytest.param(sum_of_four_bits, [1, 2, -1], id="negative"),
    ],
)
def test_secure_sum_names_the_client_that_breaks_its_bound(
    invoke: Invoke, comp: Any, values: list[int]
) -> None:
    with pytest.raises(
        errors.ComputationError, match=r"at most 1[05] .*client at position 2"
    ):
        invoke(comp, values)


def modular_sum(modulus: Any, member: Any = np.int32) -> Any:
    """Return the sum of clients' values modulo a number, as read from bytes."""
    clients = flf.Reference("x", fl.FederatedType(member, fl.CLIENTS))
    array = np.asarray(modulus)
    literal = flf.Literal(modulus, fl.TensorType(array.dtype.type, array.shape))
    type_spec = fl.FunctionType(
        [clients.type_signature, literal.type_signature],
        fl.FederatedType(member, fl.SERVER),
    )
    call = flf.Call(
        flf.Intrinsic("federated_secure_modular_sum", type_spec),
        flf.Struct([clients, literal]),
    )
    function = flf.Lambda(clients.name, clients.type_signature, call)
    comp = flf.ConcreteComputation.from_building_block(function)
    return framework.deserialize_computation(framework.serialize_computation(comp))


@pytest.mark.parametrize(
    ("modulus", "member", "message"),
    [
        pytest.param(np.int32(0), np.int32, "modulus from 1 to 2147483647", id="zero"),
        pytest.param(np.int32(-5), np.int32, r"modulus from 1 .* found -5", id="below"),
        pytest.param(np.int64(128), np.int8, "modulus from 1 to 127", id="too large"),
        pytest.param(np.float32(5), np.int32, "Expected integers", id="no integer"),
        pytest.param(np.int32(5), np.float32, "Expected integers", id="of floats"),
        pytest.param(
            np.int32(5), fl.SequenceType(np.int32), "Expected integers", id="sequences"
        ),
        pytest.param(
            np.array([3, 4], np.int32),
            np.int32,
            "one with the shape of its tensor",
            id="shape",
        ),
    ],
)
def test_modular_sum_refuses_what_is_no_modulus(
    invoke: Invoke, modulus: Any, member: Any, message: str
) -> None:
    values: Any = [[1]] if isinstance(member, fl.SequenceType) else [member(1)]

    with pytest.raises(errors.RayFedError, match=message):
        invoke(modular_sum(modulus, member), values)


@fl.federated_computation(INTEGERS)
def pick_securely(values: Any) -> Any:
    keys = fl.federated_map(to_pair, values)
    table = fl.federated_value(np.float32(1.0), fl.SERVER)
    return fl.federated_secure_select(
        keys, fl.federated_value(3, fl.SERVER), table, scale
    )


@pytest.mark.claim("semantics.59")
@pytest.mark.parametrize(
    "comp",
    [
        pytest.param(sum_of_at_most_ten, id="sum"),
        pytest.param(sum_of_four_bits, id="sum of few bits"),
        pytest.param(modular_sum(np.int32(3)), id="modular sum"),
        pytest.param(pick_securely, id="select"),
        pytest.param(
            framework.compile_to_mergeable_comp_form(modular_sum(np.int32(3))),
            id="form",
        ),
    ],
)
def test_first_simulation_says_that_it_is_one(
    local_contexts: ContextFactory, caplog: pytest.LogCaptureFixture, comp: Any
) -> None:
    context = local_contexts(workers=1)

    with caplog.at_level(logging.WARNING, "ray_fed"):
        context.invoke(comp, [1])
        context.invoke(comp, [1])
        context.invoke(sum_of_pairs, [1])

    said = [record for record in caplog.records if "in the clear" in record.message]
    assert len(said) == 1
