"""The seam between intrinsics and clients: where client values live and work runs.

`FederatingExecutor` knows what an intrinsic means, a strategy knows where clients are.
Neither knows the other's half:

    place    values of clients, or one value for all of them
    map      one function on each client (None: zip), results stay where they are
    reduce   accumulate leaf by leaf, merge the leaves along the tree
    fold     map, then reduce, by one graph where the strategy has one
    close
"""

import abc
import types
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, TypeAlias

import federated_language as fl

import ray_fed.plan.plans as plans
from ray_fed.language.blocks import Function
from ray_fed.language.structs import Plain, Struct
from ray_fed.plan.outcomes import Evaluated


class Placed(Protocol):
    """A value for each client of a cohort, wherever those values are."""

    @property
    def member(self) -> fl.Type:
        """The type of one client's value."""
        ...

    async def compute(self) -> list[Plain]:
        """Return the clients' values in client order."""
        ...


PlacedArg: TypeAlias = Placed | Struct[Any]
"""What one function takes from each client: a placed value, or a struct of them."""


StrategyIntrinsic: TypeAlias = Callable[[Any, fl.FunctionType], Awaitable[Any]]
"""What an intrinsic of a strategy's own does: (argument, type of the call) -> result.

Both are what the strategy and the unplaced executor hold: a `Placed` value at clients,
an executor's value at the server and without placement, a Struct of these for a struct.
"""


class FederatingStrategy(abc.ABC):
    """How values are placed at clients and work is delegated to them.

    Attributes:
        num_clients: size of the cohort, >= 0.
        placements: that values may have.
        intrinsics: by uri, those that the strategy implements itself; None refuses one.
            All others have the meaning that every strategy gives them by its verbs.
    """

    num_clients: int
    placements: AbstractSet[fl.framework.PlacementLiteral] = frozenset(
        {fl.CLIENTS, fl.SERVER}
    )
    intrinsics: Mapping[str, StrategyIntrinsic | None] = types.MappingProxyType({})

    @abc.abstractmethod
    async def place(self, value: object, type_spec: fl.FederatedType) -> Placed:
        """Place values at the clients.

        Args:
            value: for an all-equal type one value, or one embedded in the unplaced
                executor; else a list with one value a client, in client order.
            type_spec: placed at clients.

        Raises:
            CardinalityError: the list has another length than the cohort.
            ValueMismatchError: a value is not of the type.
        """

    @abc.abstractmethod
    async def map(
        self, function: Function | None, arg: PlacedArg | None, member: fl.Type
    ) -> Placed:
        """Call a function on each client's argument.

        Args:
            function: closed; None returns the argument itself, zipped.
            arg: what it takes; None for a function of no argument.
            member: type of one result.

        Raises:
            ComputationError: the function raised; it names the first such client.
        """

    @abc.abstractmethod
    async def reduce(
        self,
        arg: Placed,
        zero: fl.framework.ExecutorValue,
        accumulate: Function,
        merge: Function,
    ) -> fl.framework.ExecutorValue:
        """Accumulate the clients of each leaf in order, merge leaves by the tree.

        Args:
            arg: T of each client.
            zero: U, embedded in the unplaced executor.
            accumulate: <U, T> -> U.
            merge: <U, U> -> U.

        Returns:
            The merged U, embedded in the unplaced executor; zero for no clients.
        """

    async def fold(
        self, subround: Any, arg: Plain = None
    ) -> Evaluated | plans.NoKernel:
        """Fold clients into the partials of subtrees of leaves, by one graph.

        It means what the computation of the subround says: `map` its work over the
        clients of each leaf, `reduce` the results, merge inside of subtrees. Where
        there is no such graph, as in a strategy without a `fold` of its own, the caller
        does these three steps itself. The bits are the same.

        Args:
            subround: a `plans.Subround` with a kernel, which says what a graph does for
                each client; or whatever the strategy takes for it.
            arg: what the computation takes, with the values of the subround's clients.

        Returns:
            The partials, and what is kept of clients; or why there are none.
        """
        del subround, arg
        return plans.NoKernel(f"{type(self).__name__} folds no clients")

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the strategy started."""
