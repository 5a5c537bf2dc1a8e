"""The data of clients: `ClientData`, and references to single clients."""

from ray_fed.data.client_data import ClientData as ClientData
from ray_fed.values.client_references import ClientReference as ClientReference
from ray_fed.values.client_references import NamedClients as NamedClients

__all__ = ["ClientData", "ClientReference", "NamedClients"]
