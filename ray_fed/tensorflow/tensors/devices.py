"""Sets up TensorFlow's threads and devices in a process, and describes them.

Setting up must come before the first operation of TensorFlow in the process.
"""

import contextlib
import logging
import os
import pathlib
import platform
import subprocess
import threading
from collections.abc import Generator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context  # no public name
from tensorflow.python.util import _pywrap_util_port  # no public name

import ray_fed.errors as errors
from ray_fed.plan.fingerprint import Fingerprint

_logger = logging.getLogger(__name__)

_FLAGS = ("flags", "Featu")
"""First letters of the line with a processor's features, on x86 and on Arm."""

_LIBRARIES_MIB = 1024
"""Memory of a GPU that CUDA and its libraries take for a process, besides tensors."""

_OWN_THREADS = "TF_OVERRIDE_GLOBAL_THREADPOOL"
"""Environment variable. If it is set while TensorFlow sets up a device, the device gets
threads of its own."""

_CHOSEN_BY = ("avx", "fma", "amx", "sse4_2", "asimd", "sve", "bf16", "i8mm")
"""First letters of the features by which Eigen, XLA and oneDNN select their code."""


_threads_lost = threading.Event()
"""Event that is set in a fork of a process where TensorFlow had begun to run."""


def _note_fork() -> None:
    eager: Any = context.context_safe()
    if eager is not None and eager._initialized:  # noqa: SLF001 (no public name)
        _threads_lost.set()


os.register_at_fork(after_in_child=_note_fork)


def configure(num_threads: int, gpu_fraction: float) -> Any:
    """Set threads and devices, and return the logical device for the worker's ops.

    `gpu_fraction` limits the memory of tensors and CUDA's libraries together, on the
    first GPU. With 0, TensorFlow sees no GPU. With 1 or more, it uses the whole GPU.
    """
    set_threads(num_threads)
    gpus = tf.config.list_physical_devices("GPU")
    if not gpu_fraction or not gpus:
        tf.config.set_visible_devices([], "GPU")
        return cpu()
    tf.config.set_visible_devices(gpus[:1], "GPU")
    tf.config.experimental.enable_op_determinism()
    if gpu_fraction < 1:
        share_mib = int(_total_memory_mib() * gpu_fraction)
        limit_mib = share_mib - min(_LIBRARIES_MIB, share_mib // 2)
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=limit_mib)
        tf.config.set_logical_device_configuration(gpus[0], [limit])
    return tf.config.list_logical_devices("GPU")[0]


def cpu() -> Any:
    """Return the logical device of a worker that uses no GPU."""
    return tf.config.list_logical_devices("CPU")[0]


def split_cpu(num_executors: int) -> list[Any]:
    """Return a logical device of the CPU for each executor in this process.

    Each device has threads of its own for one op. XLA runs whole programs on these
    threads, so executors with shared threads would wait for one another. If TensorFlow
    has already set up its devices, executors share them, with the same bits.
    """
    (whole,) = tf.config.list_physical_devices("CPU")
    if tf.config.get_logical_device_configuration(whole) is None:
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(num_executors)]
        with contextlib.suppress(RuntimeError):  # TensorFlow has set up its devices
            tf.config.set_logical_device_configuration(whole, parts)
    with _threads_of_each_device():
        logical = tf.config.list_logical_devices("CPU")
    return [logical[index % len(logical)] for index in range(num_executors)]


def shared_name(device: str | None) -> str | None:
    """Return the device name to write into a graph that several devices run.

    For a CPU, it means any CPU device, so each caller's own device runs the graph.
    """
    is_cpu = device is not None and "CPU" in device
    return "/device:CPU:*" if is_cpu else device


@contextlib.contextmanager
def _threads_of_each_device() -> Generator[None]:
    # The variable is removed again, so that child processes do not inherit it.
    previous = os.environ.get(_OWN_THREADS)
    os.environ[_OWN_THREADS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_OWN_THREADS)
        if previous is not None:
            os.environ[_OWN_THREADS] = previous


def describe_missing(assigned: str) -> str:
    """Return an error message if TensorFlow sees no GPU, or "" if it sees one.

    `assigned` is a part of the message: which GPU this process got, and from whom.
    """
    if tf.config.list_physical_devices("GPU"):
        return ""
    has_cuda = tf.test.is_built_with_cuda()
    mend = (
        "see that its driver and CUDA libraries are there"
        if has_cuda
        else "install `tensorflow[and-cuda]`"
    )
    return (
        f"Expected a GPU for TensorFlow, found none: {assigned}, and TensorFlow"
        f" {tf.__version__}, built {'with' if has_cuda else 'without'} CUDA, sees"
        f" {_name_devices()}; {mend} on that node, or set `workers.num_gpus` to 0"
    )


def _name_devices() -> str:
    return ", ".join(device.name for device in tf.config.list_physical_devices())


def read_fingerprint(device: Any) -> Fingerprint:
    """Return the properties of this process that decide the bits of results.

    Call it after `set_threads`. `device` is the logical device of the worker.
    """
    return Fingerprint(
        tensorflow=tf.__version__,
        device="CPU" if device.device_type == "CPU" else _read_card(),
        instruction_set=_read_instruction_set(),
        onednn=_pywrap_util_port.IsMklEnabled(),
        threads=tf.config.threading.get_intra_op_parallelism_threads(),
    )


def _read_card() -> str:
    (card, *_) = tf.config.get_visible_devices("GPU")
    details = tf.config.experimental.get_device_details(card)
    return str(details.get("device_name", "GPU"))


def _read_instruction_set() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    lines = (line.partition(":") for line in text.splitlines())
    flags = next((has.split() for name, _, has in lines if name[:5] in _FLAGS), [])
    chosen = sorted(flag for flag in set(flags) if flag.startswith(_CHOSEN_BY))
    return " ".join([platform.machine(), *chosen])


def _total_memory_mib() -> int:
    # TensorFlow knows the memory of a GPU only when the device is set up. A limit must
    # be set before.
    command = [
        "nvidia-smi",
        "--query-gpu=memory.total",
        "--format=csv,noheader,nounits",
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    if visible:
        command += ["-i", visible]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(completed.stdout.split()[0])


def set_threads(num_threads: int, num_executors: int = 1) -> bool:
    """Set TensorFlow's threads, and return whether the process now has them.

    `num_threads` work on one op, which affects bits. `num_executors` times as many ops
    run at once, so that executors do not wait for one another. If TensorFlow already
    has other threads, a warning is logged. Raises ContextStateError in a fork of a
    process that ran TensorFlow, where ops would wait for threads forever.
    """
    if _threads_lost.is_set():
        raise errors.ContextStateError(
            "Expected a process where TensorFlow can run, found one that was forked"
            " from a process where it had begun to, whose threads did not follow: start"
            ' it by `spawn`, as in multiprocessing.get_context("spawn"), or fork before'
            " TensorFlow is used."
        )
    try:
        tf.config.threading.set_intra_op_parallelism_threads(num_threads)
        tf.config.threading.set_inter_op_parallelism_threads(
            num_threads * num_executors
        )
    except RuntimeError:
        if tf.config.threading.get_intra_op_parallelism_threads() == num_threads:
            return True
        _logger.warning(
            "TensorFlow runs in this process with other threads than the %d that"
            " workers have: results may differ from theirs in the last bits. Start a"
            " new process (in a notebook: restart the kernel), and call ray_fed.init"
            " before TensorFlow runs there.",
            num_threads,
        )
        return False
    return True
