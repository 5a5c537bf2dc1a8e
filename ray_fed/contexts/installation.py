"""`init`, `create_context`, `shutdown`: one default context for a process."""

import threading

import federated_language as fl

import ray_fed.errors as errors
from ray_fed.config import Config
from ray_fed.contexts.factory import ExecutionContext, build_context

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
                if (address, config) != (self._address, context.config):
                    raise errors.ContextStateError(
                        "Expected the address and config of the context that is"
                        " installed, found others: call ray_fed.shutdown() first."
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


_installation = _Installation()


def init(
    address: str | None = None, *, config: Config | None = None
) -> ExecutionContext:
    """Connect, build a context and make it federated_language's default here.

    The default is one of each thread: call `init` again, with the same arguments, in
    another thread to have it there too.

    Args:
        address: "local" starts a Ray of its own, "auto" or "ray://..." joins one; None
            joins one that is running for this user, else starts one.
        config: settings; None reads `RAY_FED_...` variables.

    Returns:
        The context, also the one that is installed already for the same arguments;
        usable with `with`, which closes it.

    Raises:
        ContextStateError: another context is installed.
        ConfigError: the environment holds a setting that is not one, or `config` is no
            `Config`.
        ClusterError: there is no cluster at the address, or it is too small.
    """
    return _installation.install(address, _settings(config))


def create_context(
    config: Config | None = None, *, address: str | None = None
) -> ExecutionContext:
    """Return the context that `init` would build, without installing it.

    Args:
        config: settings; None reads `RAY_FED_...` variables.
        address: as for `init`.

    Raises:
        ConfigError: the environment holds a setting that is not one, or `config` is no
            `Config`.
        ClusterError: there is no cluster at the address, or it is too small.
    """
    return build_context(address, _settings(config))


def _settings(config: object) -> Config:
    if config is None:
        return Config.load()
    if not isinstance(config, Config):
        raise errors.ConfigError(
            f"Expected a ray_fed.Config, found a {type(config).__name__}: pass"
            " ray_fed.Config(...) with the settings as its arguments."
        )
    return config


def shutdown() -> None:
    """Close the context that `init` installed; without one, do nothing."""
    _installation.remove()
