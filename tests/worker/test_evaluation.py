"""Plans evaluated leaf by leaf: merges along the tree, clients by their index."""

# pyright: reportUnknownLambdaType=false

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.language import blocks
from ray_fed.plan import merge_tree
from ray_fed.plan.random_keys import DrawKey
from ray_fed.worker import evaluation

flf = fl.framework
federated_computation = cast("Callable[..., Any]", fl.federated_computation)

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
DRAW = DrawKey(seed=0, invocation=0)


@rtf.computation(np.float32, np.float32)
def add(x: Any, y: Any) -> Any:
    return x + y


@rtf.computation(np.float32, np.float32)
def append_digit(number: Any, digit: Any) -> Any:
    return 10 * number + digit


total = federated_computation(lambda x: fl.federated_sum(x), AT_CLIENTS)  # noqa: PLW0108


def serialized(comp: Any) -> bytes:
    return comp.to_proto().SerializeToString(deterministic=True)


def subround(
    comp: Any, merge: Any, leaves: range, num_clients: int, clients_per_leaf: int = 1
) -> plans.Subround:
    cut = merge_tree.cut_leaves(num_clients, clients_per_leaf)
    return plans.Subround(
        computation=serialized(comp),
        merge=serialized(merge),
        clients_per_leaf=clients_per_leaf,
        first_leaf=leaves.start,
        leaves=tuple(cut[index] for index in leaves),
        draw=DRAW,
        subtrees=tuple(merge_tree.subtrees(leaves.start, leaves.stop, (0, len(cut)))),
    )


def finish(merge: Any, nodes: list[merge_tree.Subtree]) -> plans.Finish:
    return plans.Finish(
        merge=serialized(merge),
        subtrees=tuple(nodes),
        partial_type=blocks.serialize_type(fl.TensorType(np.float32)),
        computation=None,
        num_clients=0,
        clients_per_leaf=1,
        draw=DRAW,
    )


Run = Callable[[plans.Subround | plans.Finish, Any], list[Any]]


@pytest.fixture
def run() -> Iterator[Run]:
    """Evaluates a plan over one leaf stack."""
    leaf = stacks.threaded_stacks(1)[0]

    def evaluate(comp: plans.Subround | plans.Finish, arg: Any) -> list[Any]:
        def stack_for(num_clients: int) -> ReferenceResolvingExecutor:
            return stacks.local_stack(num_clients, [leaf], leaf, comp.clients_per_leaf)

        executors = evaluation.Executors(stack_for, leaf)
        evaluated = asyncio.run(evaluation.evaluate_plan(comp, arg, executors))
        return evaluated.values

    yield evaluate
    leaf.close()


class TestSubround:
    def test_merges_leaves_inside_the_largest_whole_subtrees(self, run: Run) -> None:
        arg = [float(n) for n in range(1, 7)]

        partials = run(subround(total, append_digit, range(6), 9), arg)

        # Leaves 0 to 4 are one subtree: 1 and 2, then 3; 4 and 5; then the two.
        assert partials == [10 * (10 * 12 + 3) + 45, 6]

    def test_starts_in_the_middle_of_the_tree(self, run: Run) -> None:
        arg = [float(n) for n in range(4, 8)]

        partials = run(subround(total, append_digit, range(4, 8), 9), arg)

        assert partials == [4, 56, 7]

    def test_gives_the_same_bits_however_it_is_cut(self, run: Run) -> None:
        values = np.random.default_rng(7).normal(size=7).astype(np.float32)
        clients = list(values)
        whole = run(subround(total, add, range(7), 7), clients)
        a, b, c, d, e, f, g = clients  # in float32, along the documented tree
        by_numpy = ((a + b) + (c + d)) + ((e + f) + g)

        assert whole[0].tobytes() == by_numpy.tobytes()
        for cut in (2, 3, 5):
            first = subround(total, add, range(cut), 7)
            second = subround(total, add, range(cut, 7), 7)
            partials = run(first, clients[:cut]) + run(second, clients[cut:])
            nodes = [*first.subtrees, *second.subtrees]
            [merged] = run(finish(add, nodes), (partials, []))

            assert merged.tobytes() == whole[0].tobytes()

    def test_raises_errors_without_a_client_as_they_are(self, run: Run) -> None:
        comp = subround(total, add, range(1), 2, clients_per_leaf=2)

        with pytest.raises(errors.CardinalityError, match="Expected 2 values"):
            run(comp, [1.0])


class TestFinish:
    def test_merges_partials_by_the_tree(self, run: Run) -> None:
        nodes: list[merge_tree.Subtree] = [(0, 2), (2, 3), (3, 4), (4, 5)]

        [merged] = run(finish(append_digit, nodes), ([1.0, 2.0, 3.0, 4.0], []))

        # Leaves 0 and 1 with 2, the last two, then these.
        assert merged == 10 * 12 + 34
