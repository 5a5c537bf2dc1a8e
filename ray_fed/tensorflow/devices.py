"""Sets TensorFlow up for one executor: threads, and which GPU how much of.

Must run before TensorFlow's first operation of the process.
"""

import logging
import os
import subprocess
from typing import Any

import tensorflow as tf

_logger = logging.getLogger(__name__)


def configure(num_threads: int, gpu_fraction: float) -> Any:
    """Set threads and devices; return the logical device to pin work to.

    Args:
        num_threads: intra-op and inter-op threads, >= 1: equal on every backend, as
            they are part of what decides the bits of a result.
        gpu_fraction: of one card, as a memory limit; 0 hides every GPU; 1 and more
            uses the whole first card.

    Returns:
        A `tf.config.LogicalDevice`.
    """
    set_threads(num_threads)
    gpus = tf.config.list_physical_devices("GPU")
    if not gpu_fraction or not gpus:
        tf.config.set_visible_devices([], "GPU")
        return tf.config.list_logical_devices("CPU")[0]
    tf.config.set_visible_devices(gpus[:1], "GPU")
    tf.config.experimental.enable_op_determinism()
    if gpu_fraction < 1:
        limit_mib = int(_total_memory_mib() * gpu_fraction)
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=limit_mib)
        tf.config.set_logical_device_configuration(gpus[0], [limit])
    return tf.config.list_logical_devices("GPU")[0]


def _total_memory_mib() -> int:
    """Return the memory of the card that this process sees first, in MiB.

    TensorFlow tells only once the device is set up, which is too late for a limit.
    """
    command = [
        "nvidia-smi",
        "--query-gpu=memory.total",
        "--format=csv,noheader,nounits",
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    if visible:
        command += ["-i", visible]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(found.stdout.split()[0])


def set_threads(num_threads: int) -> bool:
    """Set TensorFlow's threads; return whether it was still possible."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(num_threads)
        tf.config.threading.set_inter_op_parallelism_threads(num_threads)
    except RuntimeError:
        if tf.config.threading.get_intra_op_parallelism_threads() == num_threads:
            return True
        _logger.warning(
            "TensorFlow ran before ray_fed.init, with other threads than the %d that"
            " workers have: results may differ from theirs in the last bits. Call"
            " ray_fed.init first.",
            num_threads,
        )
        return False
    return True
