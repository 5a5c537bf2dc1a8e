"""Settings: one frozen tree, read from YAML, the environment and arguments.

Later sources win: defaults, a YAML file, `RAY_FED_...` variables, arguments. A variable
names a field, with two underscores between levels (`RAY_FED_RETRY__CRASH=5`), and its
value is read as YAML. Unknown keys are refused, with the nearest one.
"""

from ray_fed.config.settings import (
    Config,
    Data,
    Kernels,
    Retry,
    Stragglers,
    Subrounds,
    Workers,
    check_config,
)

__all__ = [
    "Config",
    "Data",
    "Kernels",
    "Retry",
    "Stragglers",
    "Subrounds",
    "Workers",
    "check_config",
]
