"""`init`, `create_context` and `shutdown`: at most one installed context a process."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import federated_language as fl

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.config import Config, check_address, resolve_config
from ray_fed.contexts.execution_context import ExecutionContext, Holders
from ray_fed.contexts.factory import build_context

flf = fl.framework


class _Installation:
    """The context that `init` installed in this process, with its address."""

    def __init__(self) -> None:
        self._context: ExecutionContext | None = None
        self._address: str | None = None

    def install(self, address: str | None, config: Config) -> ExecutionContext:
        # The lock is also held while a context closes, so that a new context is built
        # only after the old one has ended.
        with Holders.lock:
            context = self._context
            if context is not None and context.is_open:
                asked = {"address": address, **config.model_dump()}
                installed = {"address": self._address, **context.config.model_dump()}
                if asked != installed:
                    raise errors.ContextStateError(
                        "Expected the address and settings of the installed context,"
                        f" found other ones: {_differing(installed, asked)}. Call"
                        " ray_fed.shutdown() first, or `init` with the same arguments."
                    )
            else:
                context = build_context(address, config)
                context.holders = Holders(lambda: self.install(address, config))
                self._context, self._address = context, address
            context.holders.add()
            flf.set_default_context(context)
            return context

    def remove(self) -> None:
        with Holders.lock:
            context, self._context = self._context, None
            if context is not None:
                context.close()


def _differing(installed: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    # Values of `runtime_env` are left out, because they may contain secrets.
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


@tracebacks.shorten
def init(
    address: str | None = None, *, config: Config | None = None
) -> ExecutionContext:
    """Build a context, and make it federated_language's default in this thread.

    federated_language runs the calls of a computation on its default context. Each
    thread has its own default. To use the context in another thread, too, call `init`
    there with the same arguments.

    Args:
        address: "local" starts a new Ray. "auto", "host:port" or "ray://host:port"
            joins a running Ray. None joins as `ray.init` does: the Ray that this
            process is connected to, the Ray at RAY_ADDRESS, or the Ray that this user's
            `ray start` announced. If there is none, None starts a new Ray.
        config: The settings. Environment variables `RAY_FED_...` set the fields that
            `config` leaves out.

    Returns:
        The new context, or the installed context if it has the same arguments. Call
        `shutdown` to close it, or use it in a `with` statement. If several threads use
        the context in `with` statements, the last statement to end closes it. If an
        `init` without a `with` statement came first, only `shutdown` does.

    Raises:
        ContextStateError: A context with other arguments is installed.
        ConfigError: An environment variable is no valid setting, `config` is no
            `Config`, or `address` is no text.
        ClusterError: There is no Ray at the address, or it is too small.
    """
    check_address(address)
    return _installation.install(address, resolve_config(config))


@tracebacks.shorten
def create_context(
    config: Config | None = None, *, address: str | None = None
) -> ExecutionContext:
    """Return a new context, without making it the default of federated_language.

    Args:
        config: The settings. Environment variables `RAY_FED_...` set the fields that
            `config` leaves out.
        address: Address of Ray, as for `init`.

    Raises:
        ConfigError: An environment variable is no valid setting, `config` is no
            `Config`, or `address` is no text.
        ClusterError: There is no Ray at the address, or it is too small.
    """
    check_address(address)
    return build_context(address, resolve_config(config))


@tracebacks.shorten
def shutdown() -> None:
    """Close the context that `init` installed, even if other threads still use it.

    If no context is installed, nothing happens.
    """
    _installation.remove()
