"""What a run begins with: who draws its cohorts, and what its clients kept."""

import os
from typing import Any

import ray_fed.errors as errors
from ray_fed.learning.client_states import ClientStates
from ray_fed.learning.cohorts import CohortSampler, PrivateCohorts
from ray_fed.learning.noise_state import check_noise
from ray_fed.learning.processes import LearningProcess
from ray_fed.learning.run_clients import check_client_states
from ray_fed.learning.saved_clients import SavedClientStates


def choose_sampler(
    process: LearningProcess,
    num_clients: int,
    cohort_size: int | None,
    seed: int,
    state: Any,
) -> CohortSampler | PrivateCohorts:
    """Return who draws the cohorts of a run.

    Args:
        process: that is run.
        num_clients: of the data.
        cohort_size: that is asked for.
        seed: of the cohorts.
        state: to go on from, if any.

    Raises:
        ConfigError: there are no clients, the process is for other clients or draws its
            own cohorts, or the state's rounds had other noise.
    """
    if not num_clients:
        raise errors.ConfigError("Expected clients in `data`, found none.")
    wanted = getattr(process, "num_clients", None)
    if wanted is not None and wanted != num_clients:
        raise errors.ConfigError(
            f"Expected data of {wanted} clients, which the process was built for"
            f" (`num_clients`), found {num_clients}: its steps or its noise would be of"
            " another size. Build it for these."
        )
    privacy = getattr(process, "privacy", None)
    check_noise(privacy, state)
    if privacy is None:
        size = num_clients if cohort_size is None else cohort_size
        return CohortSampler(num_clients, size, seed)
    if cohort_size is not None:
        raise errors.ConfigError(
            f"Expected no `cohort_size` for a process with noise, found {cohort_size}:"
            f" its cohorts are drawn as its guarantee assumes, {privacy}."
        )
    return PrivateCohorts(num_clients, privacy, seed)


def begin_clients(
    process: LearningProcess,
    num_clients: int,
    storage_path: str | os.PathLike[str] | None,
    given: ClientStates | None,
    state: Any,
) -> ClientStates | None:
    """Return what holds the values of clients of a run, none yet.

    Args:
        process: that is run.
        num_clients: of the data.
        storage_path: of the run.
        given: to begin with, if any.
        state: to go on from, if any.

    Raises:
        ConfigError: the process keeps nothing of clients, or what they kept is missing.
        ValueMismatchError: what is given is of another process or of other clients.
    """
    initial = getattr(process, "initial_client_state", None)
    if initial is None:
        if given is not None:
            raise errors.ConfigError(
                "Expected no `client_states`, found some for a process whose clients"
                " keep nothing between rounds."
            )
        return None
    if state is not None and given is None:
        raise errors.ConfigError(
            "Expected `client_states` beside `state`, found none: clients of this"
            " process go on from what they kept, as the server does."
        )
    if given is not None:
        check_client_states(given, initial, num_clients)
        if state is None and len(given.ids):
            raise errors.ConfigError(
                "Expected `state` beside `client_states`, found none: what clients kept"
                " goes on with the server's state of the same result. Pass"
                " `state=result.state`, too."
            )
    empty = ClientStates(initial) if given is None else given.emptied(initial)
    if storage_path is None:
        return empty
    folder = f"{os.fspath(storage_path)}/clients"
    return SavedClientStates(initial, folder, memory_bytes=empty.max_memory_bytes)
