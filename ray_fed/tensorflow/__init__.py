"""The TensorFlow front end: write the work of one client or server as a function.

Importing this package imports TensorFlow; importing `ray_fed` does not.
"""

from ray_fed.tensorflow.importing import import_tensorflow

import_tensorflow()

from ray_fed.tensorflow.external.external_data import data  # noqa: E402
from ray_fed.tensorflow.front.computation import computation  # noqa: E402
from ray_fed.tensorflow.graphs.identity import identify_computation  # noqa: E402

__all__ = ["computation", "data", "identify_computation"]
