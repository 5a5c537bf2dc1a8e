"""Federated programs: loops of computations whose state stays in the object store.

    with ray_fed.program.RayFederatedContext() as context:
        fl.framework.set_default_context(context)
        state = initialize()                      # returns references at once
        for clients in cohorts:
            state, metrics = next(state, clients)     # state stays in the store
            await manager.release(metrics, key)       # metrics are read here

Use the release managers of federated_language.
"""

from ray_fed.data.client_data import ClientData
from ray_fed.program.context import RayFederatedContext, RayValueReference
from ray_fed.program.data_sources import ClientDataIterator, ClientDataSource
from ray_fed.program.managers import FileProgramStateManager
from ray_fed.program.samplers import (
    AdaptiveSampler,
    AvailabilitySampler,
    ClientMetrics,
    OortSampler,
    PoissonSampler,
    PowerOfChoiceSampler,
    Sampler,
    UniformSampler,
    WeightedSampler,
)
from ray_fed.values.client_references import ClientReference

__all__ = [
    "AdaptiveSampler",
    "AvailabilitySampler",
    "ClientData",
    "ClientDataIterator",
    "ClientDataSource",
    "ClientMetrics",
    "ClientReference",
    "FileProgramStateManager",
    "OortSampler",
    "PoissonSampler",
    "PowerOfChoiceSampler",
    "RayFederatedContext",
    "RayValueReference",
    "Sampler",
    "UniformSampler",
    "WeightedSampler",
]
