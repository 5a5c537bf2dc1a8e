"""Which work of clients runs first: that which makes the keys of a `federated_select`.

    v1=federated_map(<choose, argument[0]>),           first: v1, for all clients
    v2=federated_select(<v1, max_key, state, f>),      then what the keys select
    v3=federated_map(<train, <argument[0], v2>>)       last:  v3, of v1 and v2 as data

What is selected is data of a kernel. So the keys have to be there before it runs.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import federated_language as fl

from ray_fed.compiler.aggregates import UnfusedError, intrinsic_call
from ray_fed.compiler.keeping import count_member_bytes
from ray_fed.compiler.normalize import free_references, needed_names
from ray_fed.compiler.substitution import select
from ray_fed.language import type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock
_WORK = (
    flf.FEDERATED_MAP.uri,
    flf.FEDERATED_MAP_ALL_EQUAL.uri,
    flf.FEDERATED_EVAL_AT_CLIENTS.uri,
)
_SELECTS = flf.FEDERATED_SELECT.uri, flf.FEDERATED_SECURE_SELECT.uri

_MOST_HANDED_BYTES = 64 * 2**10
"""Of each client, what may be kept between its first and its last work: all clients of
a subround do the one before any does the other."""


@dataclasses.dataclass(frozen=True)
class ClientLocals:
    """Locals at clients, in two parts.

    Attributes:
        last: names of those that are evaluated last, in order.
        handed: names of those that are evaluated first and used last, in order.
    """

    last: Sequence[str]
    handed: Sequence[str]


def divide(roots: Iterable[Block], locals_: Mapping[str, Block]) -> ClientLocals:
    """Return which locals at clients are evaluated first, and which last.

    No work is done twice: what both need is handed on.

    Args:
        roots: what is needed in the end.
        locals_: of an `up_to_merge`, by name; each refers to earlier ones alone.

    Raises:
        UnfusedError: what would be handed on has too many bytes, or nobody knows how
            many.
    """
    at_clients = {
        name: block
        for name, block in locals_.items()
        if type_checks.is_at_clients(block.type_signature)
    }
    wanted = [name for root in roots for name in free_references(root)]
    needed = needed_names(wanted, at_clients)
    keys = {
        name
        for each in needed
        for name in _keys_of(at_clients[each]) & at_clients.keys()
    }
    first = needed_names(keys, at_clients)
    stops = frozenset(n for n in first if n in keys or _uri(at_clients[n]) in _WORK)
    last = needed_names(wanted, at_clients, stops)
    handed = [name for name in at_clients if name in last & stops]
    _check_sizes([count_member_bytes(at_clients[name]) for name in handed])
    return ClientLocals([name for name in at_clients if name in last - stops], handed)


def _check_sizes(num_bytes: Sequence[int]) -> None:
    found = f"{sum(num_bytes):,}"
    if not all(num_bytes):
        found = "an unknown number of"  # strings, sequences, shapes of any size
    elif sum(num_bytes) <= _MOST_HANDED_BYTES:
        return
    raise UnfusedError(
        "`federated_select` of keys that clients compute, with values beside them or"
        f" behind them of {found} bytes, where at most {_MOST_HANDED_BYTES:,} are kept"
    )


def _keys_of(block: Block) -> frozenset[str]:
    """Return the name that the keys of a selection have, if clients compute them."""
    uri, argument = intrinsic_call(block)
    return free_references(select(argument, 0)) if uri in _SELECTS else frozenset()


def _uri(block: Block) -> str:
    return intrinsic_call(block)[0]
