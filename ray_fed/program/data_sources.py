"""`ClientDataSource`: the cohorts of a program, one a round, and where it is in them.

source.iterator() --select(k)--> clients of round 0 --select(k)--> of round 1 ...
|                                                        |
+--<-- source.resume(saved) <--- saved with the run <----+
"""

import hashlib
import json
from typing import Any, Self, cast

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.data.client_data import ClientData
from ray_fed.observability import reprs
from ray_fed.program.samplers import Sampler, UniformSampler

_FIELDS = {"round_index", "clients", "sampler"}


class ClientDataSource(fl.program.FederatedDataSource):
    """Clients of `ClientData`, drawn by a sampler.

    Args:
        data: to draw from.
        sampler: draws; None: `UniformSampler(0)`.
    """

    def __init__(self, data: ClientData, sampler: Sampler | None = None) -> None:
        self.data = data
        self.sampler = UniformSampler() if sampler is None else sampler

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
        """Return an iterator that goes on where another one was.

        Args:
            saved: that one, its `state`, or its bytes.

        Raises:
            SavedStateError: this is no state of an iterator.
            ConfigError: it is that of other clients, or of another sampler.
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
        ids = hashlib.sha256(repr(self.data.ids).encode()).hexdigest()[:16]
        drawing = hashlib.sha256(repr(self.sampler).encode()).hexdigest()[:16]
        name = type(self.sampler).__name__
        return {
            "round_index": 0,
            "clients": f"{len(self.data)} clients {ids}",
            "sampler": f"{name} {drawing}",
        }


class ClientDataIterator(fl.program.FederatedDataSourceIterator):
    """Draws the clients of one round after another; made by a `ClientDataSource`.

    What `from_bytes` returns has no clients: `ClientDataSource.resume` takes it.

    Args:
        source: to draw from; None: the iterator was read from a file.
        state: what decides where it is.
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
        """Where the iterator is, as plain data; its `round_index` is the next one's."""
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
            k: how many, as the sampler takes it.

        Raises:
            ConfigError: the sampler cannot draw so many.
            ContextStateError: the iterator was read from a file, and not resumed.
        """
        source = self._opened()
        round_index = self._state["round_index"]
        drawn = source.sampler.sample(round_index, len(source.data), k)
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
            SavedStateError: these are no bytes of an iterator.
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
                " file: go on with `source.resume(iterator)`."
            )
        return self._source


def _check_state(state: object) -> None:
    fits = isinstance(state, dict) and set(cast("dict[str, Any]", state)) == _FIELDS
    index = cast("dict[str, Any]", state)["round_index"] if fits else None
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise errors.SavedStateError(
            f"Expected the state of an iterator, with {sorted(_FIELDS)}, found"
            f" {errors.describe(state)}."
        )
