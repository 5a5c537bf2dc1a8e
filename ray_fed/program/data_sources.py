"""`ClientDataSource`: selects the clients of each round, also in a resumed program.

    source.iterator() --select(k)--> clients of round 0 --select(k)--> of round 1 ...
    |                                                        |
    +--<-- source.resume(saved) <--- saved with the run <----+

`k` is the number of clients in a round.
"""

import json
from typing import Any, Self, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.data.client_data import ClientData
from ray_fed.language.type_checks import is_whole
from ray_fed.observability import reprs
from ray_fed.program.descriptions import describe_part, digest
from ray_fed.program.samplers import Sampler, UniformSampler, check_cohort

_FIELDS = {"round_index", "clients", "sampler"}


class ClientDataSource(fl.program.FederatedDataSource):
    """A data source whose iterators select clients of `ClientData` by a sampler.

    Args:
        data: All clients.
        sampler: Sampler of each round's clients. None means `UniformSampler(0)`.

    Raises:
        ConfigError: The sampler depends on metrics of clients, or has no `sample`.
    """

    def __init__(self, data: ClientData, sampler: Sampler | None = None) -> None:
        self.data = data
        self.sampler = UniformSampler() if sampler is None else sampler
        if not callable(getattr(self.sampler, "sample", None)):
            raise errors.ConfigError(
                "Expected a sampler with a method `sample`, found"
                f" {errors.describe(self.sampler)}: a source does not evaluate clients."
                " Pass an adaptive sampler to `learning.run`."
            )

    @override
    def __repr__(self) -> str:
        drawn = reprs.shorten(repr(self.sampler))
        return f"<source of {self.data!r}, drawn by {drawn}>"

    @property
    @override
    def federated_type(self) -> fl.FederatedType:
        return fl.FederatedType(self.data.type_signature, fl.CLIENTS)

    @override
    @tracebacks.shorten
    def iterator(self) -> "ClientDataIterator":
        """Return an iterator at round 0."""
        return ClientDataIterator(self, self._first_state())

    @tracebacks.shorten
    def resume(
        self, saved: "ClientDataIterator | dict[str, Any] | bytes"
    ) -> "ClientDataIterator":
        """Return an iterator that continues at the position of another iterator.

        Args:
            saved: The other iterator, its `state`, or its bytes.

        Raises:
            SavedStateError: The value is not the state of an iterator.
            ConfigError: The other iterator had other clients, another sampler, or
                another arrangement of rows.
        """
        if isinstance(saved, bytes):
            saved = ClientDataIterator.from_bytes(saved)
        state = saved.state if isinstance(saved, ClientDataIterator) else saved
        _check_state(state)
        for part, found in self._first_state().items():
            if part != "round_index" and state[part] != found:
                raise errors.ConfigError(
                    f"Expected the {part} of the run that was saved, `{state[part]}`,"
                    f" found `{found}`: build the source as it was built there."
                )
        return ClientDataIterator(self, dict(state))

    def _first_state(self) -> dict[str, Any]:
        described = repr((self.data.ids, sorted(self.data.describe().items())))
        drawing = json.dumps(describe_part("sampler", self.sampler))
        name = type(self.sampler).__name__
        return {
            "round_index": 0,
            "clients": f"{len(self.data)} clients {digest(described.encode())}",
            "sampler": f"{name} {digest(drawing.encode())}",
        }


class ClientDataIterator(fl.program.FederatedDataSourceIterator):
    """Selects the clients of one round after another, for a `ClientDataSource`.

    An iterator of `from_bytes` has no clients. Pass it to `ClientDataSource.resume`.

    Args:
        source: The source of the clients. None if the iterator was read from a file.
        state: The index of the next round, and descriptions of clients and sampler.
    """

    def __init__(self, source: ClientDataSource | None, state: dict[str, Any]) -> None:
        self._source = source
        self._state = state

    @override
    def __repr__(self) -> str:
        clients, sampler = self._state["clients"], self._state["sampler"]
        text = f"round {self._state['round_index']} of {clients}, drawn by {sampler}"
        return f"<iterator at {reprs.shorten(text)}>"

    @property
    def state(self) -> dict[str, Any]:
        """The position, as plain data. `round_index` is the index of the next round."""
        return dict(self._state)

    @property
    @override
    def federated_type(self) -> fl.FederatedType:
        return self._opened().federated_type

    @override
    @tracebacks.shorten
    def select(self, k: int | None = None) -> ClientData:
        """Return the clients of the next round.

        Args:
            k: The number of clients. If None, the sampler decides.

        Raises:
            ConfigError: The sampler cannot draw so many clients, draws a client twice,
                or returns something other than indices of clients.
            ContextStateError: The iterator was read from a file and not resumed.
        """
        source = self._opened()
        round_index = self._state["round_index"]
        num_clients = len(source.data)
        drawn = source.sampler.sample(round_index, num_clients, k)
        drawn = check_cohort(source.sampler, drawn, num_clients)
        self._state = {**self._state, "round_index": round_index + 1}
        return source.data.pick(drawn)

    @override
    def to_bytes(self) -> bytes:
        return json.dumps(self._state, sort_keys=True).encode()

    @classmethod
    @override
    def from_bytes(cls, buffer: bytes) -> Self:
        """Return an iterator for `ClientDataSource.resume`.

        Raises:
            SavedStateError: The bytes do not describe an iterator.
        """
        try:
            state = json.loads(buffer)
        except ValueError as error:
            raise errors.SavedStateError(
                f"Expected bytes of an iterator, found {errors.describe(buffer)}."
            ) from error
        _check_state(state)
        return cls(None, state)

    def _opened(self) -> ClientDataSource:
        if self._source is None:
            raise errors.ContextStateError(
                "Expected an iterator of a data source, found one that was read from a"
                " file: continue with `source.resume(iterator)`."
            )
        return self._source


def _check_state(state: object) -> None:
    fits = isinstance(state, dict) and set(cast("dict[str, Any]", state)) == _FIELDS
    index = cast("dict[str, Any]", state)["round_index"] if fits else None
    if not is_whole(index) or index < 0:
        raise errors.SavedStateError(
            f"Expected the state of an iterator, with {sorted(_FIELDS)}, found"
            f" {errors.describe(state)}."
        )
