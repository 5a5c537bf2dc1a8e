"""Compute the mean of clients' temperatures: a federated computation without a model.

python examples/temperature.py          joins your Ray, or starts one
python examples/temperature.py local    starts a Ray of its own
"""

import sys
from typing import Any

import federated_language as fl
import numpy as np

import ray_fed
from ray_fed import tensorflow as rtf


@rtf.computation(np.float32)
def to_celsius(fahrenheit: Any) -> Any:
    """Return a client's reading in degrees Celsius: the work of one client."""
    return (fahrenheit - 32.0) * 5.0 / 9.0


@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def mean_temperature(readings: Any) -> Any:
    """Return the mean over all clients: the work of clients and server together."""
    return fl.federated_mean(fl.federated_map(to_celsius, readings))


def main(address: str | None = None) -> None:
    """Average the readings of three clients on Ray."""
    with ray_fed.init(address) as context:
        mean = mean_temperature([68.0, 70.0, 75.0])
        print(f"mean of 3 clients: {mean:.2f} °C")
        print(context.last_report)


if __name__ == "__main__":
    main(*sys.argv[1:])
