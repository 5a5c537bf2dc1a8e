"""The parts of a mergeable form that sums clients' numbers."""

from typing import Any

import federated_language as fl

from ray_fed import tensorflow as rtf


def sum_parts(dtype: Any) -> tuple[Any, Any, Any]:
    """Return `up_to_merge`, `merge` and `after_merge` of a sum of clients' numbers.

    The numbers have the NumPy type `dtype`.
    """
    at_clients = fl.FederatedType(dtype, fl.CLIENTS)

    @fl.federated_computation(at_clients)
    def total(clients: Any) -> Any:
        return fl.federated_sum(clients)

    @rtf.computation(dtype, dtype)
    def add(x: Any, y: Any) -> Any:
        return x + y

    @fl.federated_computation(at_clients, fl.FederatedType(dtype, fl.SERVER))
    def merged_alone(clients: Any, merged: Any) -> Any:
        del clients
        return merged

    return total, add, merged_alone
