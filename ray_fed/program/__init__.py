"""Federated programs: a context that keeps state in the object store, saved state.

    with ray_fed.program.RayFederatedContext() as context:
        fl.framework.set_default_context(context)
        state = initialize()                      # references, at once
        for clients in cohorts:
            state, metrics = next(state, clients)     # state never comes here
            await manager.release(metrics, key)       # metrics do

Release managers are federated_language's own.
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
