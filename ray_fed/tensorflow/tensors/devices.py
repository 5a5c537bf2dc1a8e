"""Sets TensorFlow up for one executor: threads, and which GPU how much of.

Must run before TensorFlow's first operation of the process.
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
"""How the line of a processor's flags begins, on x86 and on Arm."""

_LIBRARIES_MIB = 1024
"""What CUDA and its libraries take of a card for a process, beside its tensors."""

_OWN_THREADS = "TF_OVERRIDE_GLOBAL_THREADPOOL"
"""Where this is set as TensorFlow sets a device up, that does not share its threads."""

_CHOSEN_BY = ("avx", "fma", "amx", "sse4_2", "asimd", "sve", "bf16", "i8mm")
"""How flags begin that Eigen, XLA and oneDNN choose their kernels by."""


_threads_lost = threading.Event()
"""Set in a process that was forked from one where TensorFlow had begun to run."""


def _note_fork() -> None:
    eager: Any = context.context_safe()
    if eager is not None and eager._initialized:  # noqa: SLF001 (no public name)
        _threads_lost.set()


os.register_at_fork(after_in_child=_note_fork)


def configure(num_threads: int, gpu_fraction: float) -> Any:
    """Set threads and devices.

    Return the logical device to pin work to.

    `gpu_fraction` limits the memory of tensors and of CUDA's libraries together, on the
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
    """Return the logical device of a worker without a GPU, beside one or not."""
    return tf.config.list_logical_devices("CPU")[0]


def split_cpu(num_executors: int) -> list[Any]:
    """Return a logical device of the CPU for each executor that shares this process.

    Each device has its own threads for one op, because XLA runs whole programs on them
    and executors would wait for one another. Once TensorFlow has set up its devices,
    executors share the existing ones, with the same bits.
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
    """Return the name of a device in graphs that all devices of its kind run.

    For a CPU, the name stands for the CPU device that the caller entered.
    """
    is_cpu = device is not None and "CPU" in device
    return "/device:CPU:*" if is_cpu else device


@contextlib.contextmanager
def _threads_of_each_device() -> Generator[None]:
    """Make TensorFlow give each device that it sets up here threads of its own.

    This is a switch of the process. Processes that it starts do not inherit it.
    """
    previous = os.environ.get(_OWN_THREADS)
    os.environ[_OWN_THREADS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_OWN_THREADS)
        if previous is not None:
            os.environ[_OWN_THREADS] = previous


def describe_missing(assigned: str) -> str:
    """Return that TensorFlow sees no GPU, in words, or "" if it sees one.

    `assigned` says in words which GPU this process got, and from whom.
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
    """Return the facts that decide the bits of results here, once threads are set."""
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
    """Return the memory of the first GPU that this process sees, in MiB.

    TensorFlow knows it only once the device is set up, which is too late for a limit.
    """
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
    """Set TensorFlow's threads, and return whether this was still possible.

    `num_threads` work on one op. They affect bits, so they are equal on every backend.
    `num_executors` times as many ops run at once, or else the graphs of one executor
    would wait for another. Raises ContextStateError in a fork of a process that ran
    TensorFlow, where ops would wait forever for threads.
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
