"""Work that a worker runs as one graph, as data: an executor embeds it by content.

    PartialMerge   <U, U> -> U                      two partials
    ServerWork     what a function at the server takes -> its result
    RoundFinish    partials, merged -> what comes after them
    KeySelection   constants, keys -> what a function at the server has for each
    ClientFold     zeros, constants and clients -> partials of subtrees of leaves

What cannot be one graph has no such value: the executor refuses it, and the work is
done computation by computation, with the same bits.
"""

import abc
import dataclasses
from typing import Any, ClassVar

from typing_extensions import override

from ray_fed.plan import plans


class Fused(abc.ABC):
    """Work that is one graph.

    Attributes:
        label: what the graph is to do, in a few words.
    """

    label: ClassVar[str]

    @property
    @abc.abstractmethod
    def content(self) -> bytes:
        """What identifies it: equal content, equal graph."""


@dataclasses.dataclass(frozen=True)
class PartialMerge(Fused):
    """A merge of two partials.

    Attributes:
        merge: serialised <U, U> -> U.
    """

    label = "the merge of two partials"
    merge: bytes

    @property
    @override
    def content(self) -> bytes:
        return b"merge" + self.merge


@dataclasses.dataclass(frozen=True)
class ServerWork(Fused):
    """A function of values at the server.

    Attributes:
        function: serialised.
    """

    label = "zeros and constants at the server"
    function: bytes

    @property
    @override
    def content(self) -> bytes:
        return b"server" + self.function


@dataclasses.dataclass(frozen=True)
class RoundFinish(Fused):
    """Partials merged along their tree, and what is computed of that at the server.

    Attributes:
        merge: of two partials.
        computation: serialised; None returns what was merged.
        num_others: how many parts `computation` takes before what was merged.
    """

    label = "the finish of a round"
    merge: PartialMerge
    computation: bytes | None
    num_others: int

    @property
    @override
    def content(self) -> bytes:
        after = self.computation or b""
        head = b"finish%d %d " % (self.num_others, len(self.merge.content))
        return head + self.merge.content + after


@dataclasses.dataclass(frozen=True)
class ClientFold(Fused):
    """The work of clients and its accumulation, leaf by leaf.

    Attributes:
        kernel: functions of one client.
        merge: of two partials, for subtrees; None: no graph merges them.
        one_a_leaf: whether each of the leaves that are to run has one client.
    """

    label = "the work of clients"
    kernel: plans.Kernel
    merge: PartialMerge | None
    one_a_leaf: bool = False

    @property
    @override
    def content(self) -> bytes:
        merge = b"" if self.merge is None else self.merge.content
        return b"fold%d" % self.one_a_leaf + self.kernel.content + merge


@dataclasses.dataclass(frozen=True)
class KeySelection(Fused):
    """A function of a key, for many keys.

    Attributes:
        function: serialised, see `plans.Selection`.
    """

    label = "what keys select"
    function: bytes

    @property
    @override
    def content(self) -> bytes:
        return b"select" + self.function


class Arguments(tuple[Any, ...]):
    """What the graph of fused work takes, as its class says: embedded as it is."""

    __slots__ = ()
