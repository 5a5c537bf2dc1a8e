"""Settings that a caller gave in Python: a `Config`, or nothing."""

import ray_fed.errors as errors
from ray_fed.config.settings import Config


def check_config(config: object) -> Config:
    """Return settings that a caller gave; the defaults for None.

    Raises:
        ConfigError: they are no `Config`.
    """
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise errors.ConfigError(
            f"Expected a ray_fed.Config, found a {type(config).__name__}: pass"
            " ray_fed.Config(...) with the settings as its arguments."
        )
    return config
