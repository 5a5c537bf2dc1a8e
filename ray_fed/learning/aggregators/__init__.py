"""Aggregators, which combine the updates of clients and can be nested.

clipped(1.0, zeroed(100.0, mean()))    clip, then drop huge updates, then average
"""

from ray_fed.learning.accounting import find_noise_multiplier
from ray_fed.learning.aggregators.aggregator import (
    Aggregation,
    Aggregator,
    Summed,
    mean,
    sum_of_updates,
    with_sum,
)
from ray_fed.learning.aggregators.clipping import AdaptiveNorm, clipped, zeroed
from ray_fed.learning.aggregators.compressed import quantized, sparsified
from ray_fed.learning.aggregators.private import dp_ftrl_mean, dp_mean
from ray_fed.learning.aggregators.robust import (
    geometric_median,
    median,
    multi_krum,
    trimmed_mean,
)
from ray_fed.learning.aggregators.secure import secure_mean

__all__ = [
    "AdaptiveNorm",
    "Aggregation",
    "Aggregator",
    "Summed",
    "clipped",
    "dp_ftrl_mean",
    "dp_mean",
    "find_noise_multiplier",
    "geometric_median",
    "mean",
    "median",
    "multi_krum",
    "quantized",
    "secure_mean",
    "sparsified",
    "sum_of_updates",
    "trimmed_mean",
    "with_sum",
    "zeroed",
]
