"""Plans evaluated leaf by leaf: merges along the tree, clients by their index."""

# pyright: reportUnknownLambdaType=false

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

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

FLOAT = fl.TensorType(np.float32)
AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.float32, fl.SERVER)
DRAW = DrawKey(seed=0, invocation=0)


@rtf.computation(np.float32)
def positive(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(x > 0, ["not positive"])]):
        return tf.identity(x)


@rtf.computation(np.float32, np.float32)
def add(x: Any, y: Any) -> Any:
    return x + y


@rtf.computation(np.float32, np.float32)
def append_digit(number: Any, digit: Any) -> Any:
    return 10 * number + digit


total = federated_computation(lambda x: fl.federated_sum(x), AT_CLIENTS)  # noqa: PLW0108
total_of_positive = federated_computation(
    lambda x: fl.federated_sum(fl.federated_map(positive, x)), AT_CLIENTS
)
doubled = federated_computation(
    lambda x: fl.federated_map(rtf.computation(lambda v: 2 * v, np.float32), x),
    AT_CLIENTS,
)
scaled = federated_computation(
    lambda x, factor: fl.federated_sum(
        fl.federated_map(add, (x, fl.federated_broadcast(factor)))
    ),
    AT_CLIENTS,
    AT_SERVER,
)


def serialised(comp: Any) -> bytes:
    return comp.to_proto().SerializeToString(deterministic=True)


def subround(
    comp: Any, merge: Any, leaves: range, num_clients: int, clients_per_leaf: int = 1
) -> plans.Subround:
    cut = merge_tree.cut_leaves(num_clients, clients_per_leaf)
    return plans.Subround(
        computation=serialised(comp),
        merge=None if merge is None else serialised(merge),
        clients_per_leaf=clients_per_leaf,
        first_leaf=leaves.start,
        leaves=tuple(cut[index] for index in leaves),
        draw=DRAW,
        subtrees=tuple(merge_tree.subtrees(leaves.start, leaves.stop, (0, len(cut))))
        if merge is not None
        else (),
    )


def finish(
    merge: Any, nodes: list[merge_tree.Subtree], comp: Any = None, num_clients: int = 0
) -> plans.Finish:
    return plans.Finish(
        merge=None if merge is None else serialised(merge),
        subtrees=tuple(nodes),
        partial_type=blocks.serialise_type(FLOAT if merge is not None else EMPTY),
        computation=None if comp is None else serialised(comp),
        num_clients=num_clients,
        clients_per_leaf=1,
        draw=DRAW,
    )


EMPTY = fl.StructType([])
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

    def test_of_all_leaves_gives_one_partial(self, run: Run) -> None:
        arg = [float(n) for n in range(1, 4)]

        partials = run(subround(total, append_digit, range(3), 3), arg)

        assert partials == [10 * 12 + 3]

    def test_accumulates_the_clients_of_a_leaf(self, run: Run) -> None:
        plan_of_all = subround(total, add, range(2), 5, clients_per_leaf=3)

        assert run(plan_of_all, [1.0, 2.0, 3.0, 4.0, 5.0]) == [15.0]

    def test_without_a_merge_returns_the_result_of_each_leaf(self, run: Run) -> None:
        plan_of_two = subround(doubled, None, range(1, 3), 5, clients_per_leaf=2)

        assert run(plan_of_two, [3.0, 4.0, 5.0]) == [[6.0, 8.0], [10.0]]

    def test_hands_each_leaf_the_values_of_its_clients(self, run: Run) -> None:
        plan_of_two = subround(scaled, add, range(2), 3, clients_per_leaf=2)

        assert run(plan_of_two, ([1.0, 2.0, 3.0], 10.0)) == [36.0]

    def test_of_a_computation_without_argument(self, run: Run) -> None:
        one = rtf.computation(lambda: np.float32(1))
        comp = federated_computation(
            lambda: fl.federated_sum(fl.federated_eval(one, fl.CLIENTS))
        )
        plan_of_two = subround(comp, add, range(2), 3, clients_per_leaf=2)

        assert run(plan_of_two, None) == [3.0]

    def test_of_an_empty_cohort_has_one_leaf(self, run: Run) -> None:
        assert run(subround(total, add, range(1), 0), []) == [0.0]

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

    @pytest.mark.parametrize(
        ("clients_per_leaf", "leaves", "arg"),
        [
            pytest.param(1, range(3, 6), [1.0, -1.0, 1.0], id="leaf of one"),
            pytest.param(3, range(1, 2), [1.0, -1.0, 1.0], id="inside a leaf"),
        ],
    )
    def test_names_the_client_by_its_index_in_the_cohort(
        self, run: Run, clients_per_leaf: int, leaves: range, arg: Any
    ) -> None:
        comp = subround(total_of_positive, add, leaves, 9, clients_per_leaf)

        with pytest.raises(errors.ComputationError, match="not positive") as caught:
            run(comp, arg)

        assert caught.value.location.client_index == 4

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

    def test_of_one_partial_is_that_partial(self, run: Run) -> None:
        assert run(finish(add, [(0, 3)]), ([5.0], [])) == [5.0]

    def test_runs_what_comes_after_on_the_merged_value(self, run: Run) -> None:
        after = federated_computation(
            lambda x: fl.federated_map(
                rtf.computation(lambda v: v * 10, np.float32), x
            ),
            AT_SERVER,
        )

        comp = finish(add, [(0, 1), (1, 2)], after)

        assert run(comp, ([1.0, 2.0], [])) == [30.0]

    def test_hands_on_the_argument_where_it_is_taken(self, run: Run) -> None:
        after = federated_computation(
            lambda arg, merged: (
                fl.federated_map(add, (arg[0], fl.federated_broadcast(merged))),
                arg[1],
            ),
            fl.StructType([AT_CLIENTS, FLOAT]),
            AT_SERVER,
        )
        comp = finish(add, [(0, 1)], after, num_clients=2)

        [(at_clients, unplaced)] = run(comp, ([10.0], [([1.0, 2.0], 7.0)]))

        assert (at_clients, unplaced) == ([11.0, 12.0], 7.0)

    def test_without_partials_runs_what_comes_after_alone(self, run: Run) -> None:
        after = federated_computation(
            lambda arg, _: fl.federated_map(positive, arg), AT_CLIENTS, EMPTY
        )
        comp = finish(None, [], after, num_clients=2)

        assert run(comp, ([], [[1.0, 2.0]])) == [[1.0, 2.0]]
