"""`FederatingStrategy`: the interface by which intrinsics reach clients' values.

`FederatingExecutor` defines intrinsics (operators of federated_language, such as
`federated_map`) by four methods. A strategy decides where clients' values are:

    place    put a value at its placement: values of clients, one value for all clients,
             a value at the server, or a value at a placement of the strategy
    map      call a function for each client, or zip values of clients
    reduce   accumulate the values of each leaf (a few neighboring clients), and merge
             the results of leaves along a binary tree
    close    release everything
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
    """The values of all clients, which may be in other processes."""

    @property
    def member(self) -> fl.Type:
        """The type of one client's value."""
        ...

    async def compute(self) -> list[Plain]:
        """Return the clients' values in client order."""
        ...


PlacedArg: TypeAlias = Placed | Struct[Any]
"""The clients' arguments of a function: placed values, or a struct of placed values."""


StrategyIntrinsic: TypeAlias = Callable[[Any, fl.FunctionType], Awaitable[Any]]
"""An intrinsic that a strategy implements: an async function (argument, type of the
call) -> result.

Argument and result are values that `place` returned, values of the unplaced executor,
or Structs of these.
"""


class FederatingStrategy(abc.ABC):
    """Base class of objects that have clients' values and run clients' work.

    The unplaced executor is the executor of the server's values.

    Attributes:
        num_clients: Number of clients, >= 0.
        placements: Placements that values may have.
        intrinsics: Intrinsics that the strategy implements itself, by URI. None refuses
            an intrinsic. All other intrinsics call the methods below.
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
            value: For clients, a list with one value for each client, in client order.
                If the type is all-equal, one value, which may be embedded in the
                unplaced executor. For the server, a value that is embedded in the
                unplaced executor. For a placement of the strategy's own, the user's
                value, unchecked.
            type_spec: Type at one of `placements`.

        Returns:
            For clients, a `Placed`. For the server, usually `value`. For all other
            placements, and perhaps for the server, an object with an async method
            `compute`, which work at the server calls to read the value.

        Raises:
            CardinalityError: The list has not one value for each client.
            ValueMismatchError: A value is not of the type.
        """

    @abc.abstractmethod
    async def map(
        self, function: Function | None, arg: PlacedArg | None, member: fl.Type
    ) -> Placed:
        """Call a function for each client, and return the clients' results.

        Args:
            function: Function without free references, or None to return each client's
                argument (a struct of placed values becomes a struct for each client).
            arg: Arguments of the clients, or None for a function without a parameter.
            member: Type of one client's result.

        Raises:
            ComputationError: The function failed for a client, which the error names.
        """

    @abc.abstractmethod
    async def reduce(
        self,
        arg: Placed,
        zero: fl.framework.ExecutorValue,
        accumulate: Function,
        merge: Function,
    ) -> fl.framework.ExecutorValue:
        """Accumulate the values of each leaf's clients in order, and merge the leaves.

        Args:
            arg: Values of the clients, each of a type T.
            zero: Initial accumulator of a type U, embedded in the unplaced executor.
            accumulate: Function <U, T> -> U.
            merge: Function <U, U> -> U.

        Returns:
            The merged U, embedded in the unplaced executor. Without clients, this is
            `zero`.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything that the strategy started."""
