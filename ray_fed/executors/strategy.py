"""The seam between intrinsics and clients: where client values live and work runs.

`FederatingExecutor` knows what an intrinsic means, a strategy knows where clients are.
Neither knows the other's half:

    place    a value at its placement: values of clients, or one for all of them;
             the value at the server; whatever a placement of its own has
    map      one function on each client (None: zip), results stay where they are
    reduce   accumulate leaf by leaf, merge the leaves along the tree
    close
"""

import abc
import types
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, TypeAlias

import federated_language as fl

from ray_fed.language.blocks import Function
from ray_fed.language.structs import Plain, Struct


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

Both are what the strategy and the unplaced executor hold: what `place` returned, an
executor's value without placement, a Struct of these for a struct.
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
    async def place(self, value: Any, type_spec: fl.FederatedType) -> Any:
        """Place a value at its placement.

        Args:
            value: at the clients, for an all-equal type one value, or one embedded in
                the unplaced executor, else a list with one value a client, in client
                order; at the server a value embedded in the unplaced executor; at a
                placement of the strategy's own what was passed, unchecked.
            type_spec: placed at one of `placements`.

        Returns:
            At the clients, their values; at the server a value that the unplaced
            executor takes, as a rule the same; else what has a coroutine `compute`.

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

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the strategy started."""
