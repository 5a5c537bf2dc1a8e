"""Decides which work of clients runs first: the work that computes keys.

In a `federated_select`, each client sends keys to the server and receives an element
for each key. Selected elements are data of a kernel, which is one graph for many
clients. So the keys of all clients must exist before the kernel runs.

    v1=federated_map(<choose, argument[0]>),           first: v1, for all clients
    v2=federated_select(<v1, max_key, state, f>),      then the selected elements
    v3=federated_map(<train, <argument[0], v2>>)       last:  v3, of v1 and v2 as data
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import federated_language as fl

import ray_fed.plan.plans as plans
from ray_fed.compiler.aggregates import intrinsic_call
from ray_fed.compiler.expressions import free_references, needed_names, select
from ray_fed.compiler.kept_values import count_member_bytes
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
"""Maximum bytes of the values that one client passes from its first to its last work.
These values of all clients of a subround are in memory at once."""


@dataclasses.dataclass(frozen=True)
class ClientLocals:
    """Names of locals at clients, each list in order.

    Attributes:
        last: Locals that are evaluated last.
        handed: Locals that are evaluated first, and that `last` uses.
    """

    last: Sequence[str]
    handed: Sequence[str]


def divide(roots: Iterable[Block], locals_: Mapping[str, Block]) -> ClientLocals:
    """Return which locals at clients are evaluated first, and which last.

    `roots` are the values that clients must compute. Each of `locals_` refers to
    earlier locals only, and none is evaluated twice. Raises Fallback if the values of
    the first part have too many bytes, or an unknown number of bytes.
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
    stops = frozenset(
        n for n in first if n in keys or intrinsic_call(at_clients[n])[0] in _WORK
    )
    last = needed_names(wanted, at_clients, stops)
    handed = [name for name in at_clients if name in last & stops]
    _check_sizes([count_member_bytes(at_clients[name]) for name in handed])
    return ClientLocals([name for name in at_clients if name in last - stops], handed)


def _check_sizes(num_bytes: Sequence[int]) -> None:
    total = f"{sum(num_bytes):,}"
    if not all(num_bytes):
        total = "an unknown number of"  # strings, sequences, shapes of any size
    elif sum(num_bytes) <= _MOST_HANDED_BYTES:
        return
    raise plans.Fallback(
        "`federated_select` of keys that clients compute, together with other values of"
        f" {total} bytes, where at most {_MOST_HANDED_BYTES:,} can be passed on"
    )


def _keys_of(block: Block) -> frozenset[str]:
    uri, argument = intrinsic_call(block)
    return free_references(select(argument, 0)) if uri in _SELECTS else frozenset()
