"""Each case of the contract through a context: the way that users take.

Stacks of executors run the same cases in `executors/test_contract`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import federated_language as fl
import pytest

import ray_fed
import ray_fed.framework as framework
import ray_fed.values.plain_values as plain_values
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.language import type_checks
from tests.contract_cases import A_FEW, CASES, computation_of, simple
from tests.fixtures import ContextFactory, report_of

ContextFor = Callable[[str, int], ExecutionContext]

IN_SUBROUNDS = {"workers": 2, "subrounds": 3}

WAYS: Mapping[str, Mapping[str, Any]] = {
    "kernels in subrounds": IN_SUBROUNDS,
    "vectorized kernels": {
        "workers": 1,
        "clients_per_leaf": 4,
        "kernels": {"vectorized_clients": 2},
    },
    "interpreter in subrounds": IN_SUBROUNDS | {"kernels": {"enabled": False}},
}
"""`worker/test_shaped_leaves` has more of what is vectorized, and what is compiled."""

IN_FULL = ("kernels in subrounds", 4)
"""The way and number of clients that run every case; the others run `A_FEW`.

It is what users have. Other ways are made of parts that stacks of executors have too.
"""

INTERPRETED_FOR = {
    "`ray_fed_check_maximum` at clients",
    "`ray_fed_check_bitwidth` at clients",
    "`sequence_reduce` at clients",
    "a result at clients",
}
"""Reasons why the clients of a case may run without a kernel."""


@pytest.fixture(scope="module")
def local_context_for() -> Iterator[ContextFor]:
    """Contexts by way and number of clients, each made once."""
    with contextlib.ExitStack() as held:

        @functools.cache
        def build(way: str, num_clients: int) -> ExecutionContext:
            config = ray_fed.Config(
                backend="local", default_num_clients=num_clients, **WAYS[way]
            )
            return held.enter_context(ray_fed.create_context(config))

        yield build


def cases() -> Iterator[Any]:
    for way, num_clients in [("kernels in subrounds", 0), *((way, 4) for way in WAYS)]:
        for name in CASES if (way, num_clients) == IN_FULL else A_FEW:
            if num_clients or not CASES[name].needs_clients:
                given = f"{way}-{name}-{num_clients} clients"
                yield pytest.param(way, name, num_clients, id=given)


def check(context: ExecutionContext, name: str, num_clients: int) -> None:
    """Compare the result of a case with what numpy says, and how it was computed."""
    case, comp = CASES[name], computation_of(name)
    args = case.args(num_clients)

    result = context.invoke(comp, args[0] if len(args) == 1 else args or None)

    assert simple(result) == simple(case.expected(num_clients))
    plain_values.to_plain(
        result, comp.type_signature.result
    )  # the dtypes are the declared
    told = {subround.no_kernel for subround in report_of(context).subrounds}
    assert told <= {None, *INTERPRETED_FOR}


@pytest.mark.parametrize(("way", "name", "num_clients"), [*cases()])
def test_computes_what_numpy_says(
    local_context_for: ContextFor, way: str, name: str, num_clients: int
) -> None:
    parameter = computation_of(name).type_signature.parameter
    is_told = parameter is not None and type_checks.holds_clients(parameter)
    context = local_context_for(way, 0 if is_told else num_clients)  # compiles it once

    check(context, name, num_clients)


@pytest.mark.ray
@pytest.mark.parametrize("name", A_FEW)
def test_computes_what_numpy_says_on_ray(
    ray_contexts: ContextFactory, name: str
) -> None:
    """Workers run the code of threads."""
    context = ray_contexts(default_num_clients=4, **IN_SUBROUNDS)

    check(context, name, 4)


@pytest.fixture(scope="module")
def documented_context() -> Iterator[framework.MergeableCompExecutionContext]:
    """The documented context, over documented stacks, with ray_fed's compiler."""
    factories = [framework.thread_debugging_executor_factory() for _ in range(2)]
    context = framework.MergeableCompExecutionContext(
        [fl.framework.AsyncExecutionContext(factory) for factory in factories],
        compiler_fn=framework.compile_to_mergeable_comp_form,
    )
    yield context
    context.close()
    for factory in factories:
        factory.clean_up_executor({})
        for num_clients in range(5):
            factory.clean_up_executor({fl.CLIENTS: num_clients})


@pytest.mark.parametrize(
    ("name", "num_clients"),
    [(name, n) for name in A_FEW for n in (0, 4) if n or not CASES[name].needs_clients],
)
def test_computes_what_numpy_says_in_the_documented_context(
    documented_context: Any, name: str, num_clients: int
) -> None:
    case, comp = CASES[name], computation_of(name)
    parameter = comp.type_signature.parameter
    if parameter is None or not type_checks.holds_clients(parameter):
        num_clients = 0  # each subround would be of as many
    args = case.args(num_clients)

    result = documented_context.invoke(
        comp, args[0] if len(args) == 1 else args or None
    )

    assert simple(result) == simple(case.expected(num_clients))
