"""The mean of temperatures that never leave their clients: no model, no learning.

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
    """What one client does, on its own value."""
    return (fahrenheit - 32.0) * 5.0 / 9.0


@fl.federated_computation(fl.FederatedType(np.float32, fl.CLIENTS))
def mean_temperature(readings: Any) -> Any:
    """What all of them do together."""
    return fl.federated_mean(fl.federated_map(to_celsius, readings))


def main(address: str | None = None) -> None:
    """Average three readings on the actors of a Ray."""
    with ray_fed.init(address) as context:
        mean = mean_temperature([68.0, 70.0, 75.0])
        print(f"mean of 3 clients: {mean:.2f} °C")
        print(context.last_report)


if __name__ == "__main__":
    main(*sys.argv[1:])
