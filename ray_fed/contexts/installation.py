"""`init`, `create_context`, `shutdown`: one default context for a process."""

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.config import Config, check_config
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.contexts.factory import build_context

flf = fl.framework


class _Installation:
    """The context that `init` installed, if any; there is one for the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: ExecutionContext | None = None
        self._address: str | None = None

    def install(self, address: str | None, config: Config) -> ExecutionContext:
        with self._lock:
            context = self._context
            if context is not None and context.is_open:
                asked = {"address": address, **config.model_dump()}
                installed = {"address": self._address, **context.config.model_dump()}
                if asked != installed:
                    raise errors.ContextStateError(
                        "Expected the address and settings of the context that is"
                        f" installed, found other ones: {_differing(installed, asked)}."
                        " Call ray_fed.shutdown() first, or `init` with those."
                    )
                flf.set_default_context(context)
                return context
            context = build_context(address, config)
            self._context, self._address = context, address
            flf.set_default_context(context)
            return context

    def remove(self) -> None:
        with self._lock:
            context, self._context = self._context, None
        if context is not None:
            context.close()

    def renew_lock(self) -> None:
        """Have a lock that no thread holds, as one may when a process is forked."""
        self._lock = threading.Lock()


def _differing(installed: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Return the settings that differ, by name, with both values.

    Without those of `runtime_env`, which may hold secrets.
    """
    before, after = dict(_flat(installed)), dict(_flat(asked))
    names = [n for n in {**before, **after} if before.get(n) != after.get(n)]
    return ", ".join(
        f"`{name}`"
        if name.startswith("runtime_env")
        else f"`{name}` is {before.get(name)!r} there, {after.get(name)!r} here"
        for name in names
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_installation = _Installation()
os.register_at_fork(after_in_child=_installation.renew_lock)


@tracebacks.shorten
def init(
    address: str | None = None, *, config: Config | None = None
) -> ExecutionContext:
    """Connect, build a context and make it federated_language's default here.

    Each thread has a default of its own: call `init` again, with the same arguments, in
    another thread to install the context there, too.

    Args:
        address: "local" starts a Ray of its own, "auto" or "ray://..." joins one; None
            joins, as `ray.init` does, the one that this process is connected to, that
            RAY_ADDRESS names, or that this user's `ray start` announced; else starts
            one.
        config: settings; None reads `RAY_FED_...` variables.

    Returns:
        The context; where one is installed for the same arguments, that one. A `with`
        statement closes it.

    Raises:
        ContextStateError: another context is installed.
        ConfigError: the environment holds a setting that is not one, `config` is no
            `Config`, or `address` is no text.
        ClusterError: there is no cluster at the address, or it is too small.
    """
    return _installation.install(address, _settings(config))


@tracebacks.shorten
def create_context(
    config: Config | None = None, *, address: str | None = None
) -> ExecutionContext:
    """Return the context that `init` would build, without installing it.

    Args:
        config: settings; None reads `RAY_FED_...` variables.
        address: as for `init`.

    Raises:
        ConfigError: the environment holds a setting that is not one, `config` is no
            `Config`, or `address` is no text.
        ClusterError: there is no cluster at the address, or it is too small.
    """
    return build_context(address, _settings(config))


def _settings(config: object) -> Config:
    return Config.load() if config is None else check_config(config)


@tracebacks.shorten
def shutdown() -> None:
    """Close the context that `init` installed; without one, do nothing."""
    _installation.remove()
