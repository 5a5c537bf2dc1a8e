"""The interface between intrinsics and clients.

`FederatingExecutor` defines the intrinsics. A strategy keeps the values of clients and
runs their work:

    place    put a value at its placement: values of clients, one value for all clients,
             a value at the server, or a value at a placement of the strategy
    map      call a function on each client, or zip values of clients
    reduce   accumulate the clients of each leaf, and merge leaves along the tree
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
    """The values of the clients of a cohort, wherever they are."""

    @property
    def member(self) -> fl.Type:
        """The type of one client's value."""
        ...

    async def compute(self) -> list[Plain]:
        """Return the clients' values in client order."""
        ...


PlacedArg: TypeAlias = Placed | Struct[Any]
"""The argument of a function on each client: a placed value, or a struct of them."""


StrategyIntrinsic: TypeAlias = Callable[[Any, fl.FunctionType], Awaitable[Any]]
"""An intrinsic that a strategy implements: (argument, type of the call) -> result.

Argument and result are values that `place` returned, values of the unplaced executor,
or Structs of these.
"""


class FederatingStrategy(abc.ABC):
    """Places values at clients and delegates work to them.

    Attributes:
        num_clients: Size of the cohort, >= 0.
        placements: The placements that values may have.
        intrinsics: The intrinsics that the strategy implements itself, by URI. None
            refuses an intrinsic. All other intrinsics call the methods below.
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
            value: At the clients, a list with one value per client, in client order.
                If the type is all-equal, one value, which may be embedded in the
                unplaced executor. At the server, a value that is embedded in the
                unplaced executor. At a placement of the strategy, the value that was
                passed, unchecked.
            type_spec: A type at one of `placements`.

        Returns:
            At the clients, their values. At other placements, any object with a
            coroutine `compute`. At the server, this is usually the value itself. If it
            is of another class, it is computed and embedded in the unplaced executor
            when work at the server needs it.

        Raises:
            CardinalityError: The list has another length than the cohort.
            ValueMismatchError: A value is not of the type.
        """

    @abc.abstractmethod
    async def map(
        self, function: Function | None, arg: PlacedArg | None, member: fl.Type
    ) -> Placed:
        """Call a function on each client's argument.

        Args:
            function: A function without free references, or None to zip the argument.
            arg: The argument, or None for a function without a parameter.
            member: The type of a client's result.

        Raises:
            ComputationError: The function failed. The error names the first client for
                which it failed.
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
            arg: The T of each client.
            zero: The U to start with, embedded in the unplaced executor.
            accumulate: <U, T> -> U.
            merge: <U, U> -> U.

        Returns:
            The merged U, embedded in the unplaced executor. It is `zero` if there are
            no clients.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything that the strategy started."""
