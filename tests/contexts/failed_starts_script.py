"""Contexts that cannot be built, one after another: prints what each leaves behind.

    python failed_starts_script.py local|ray

Prints a JSON object: for each cause the class of its error, and how many threads,
descriptors and event loops were there after two failures that were not before them. A
failure before those two lets libraries open what they keep.
"""

import asyncio
import gc
import json
import pathlib
import sys
import threading
import time
from typing import Any

import ray

import ray_fed

LOOPS: list[Any] = []
_new_event_loop = asyncio.new_event_loop


def _noted_loop() -> asyncio.AbstractEventLoop:
    LOOPS.append(_new_event_loop())
    return LOOPS[-1]


asyncio.new_event_loop = _noted_loop


def config(**settings: Any) -> ray_fed.Config:
    return ray_fed.Config(**settings)


def fail_after(num_threads: int) -> Any:
    """Return what builds a local context where the system has no more threads."""

    def build() -> None:
        thread_class: Any = threading.Thread
        start, left = thread_class.start, [num_threads]

        def limited(thread: threading.Thread) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
            start(thread)

        thread_class.start = limited
        try:
            ray_fed.create_context(config(backend="local", workers=3))
        finally:
            thread_class.start = start

    return build


LOCAL = {
    "an address": lambda: ray_fed.create_context(
        config(backend="local"), address="auto"
    ),
    "GPUs": lambda: ray_fed.create_context(
        config(backend="local", workers={"count": 1, "num_gpus": 1})
    ),
    "no thread": fail_after(0),
    "one thread": fail_after(1),
    "threads of workers alone": fail_after(3),
}
RAY = {
    "nothing listens": lambda: ray_fed.create_context(config(), address="127.0.0.1:9"),
    "no client to join": lambda: ray_fed.create_context(
        config(), address="ray://127.0.0.1:9"
    ),
    "too many workers": lambda: ray_fed.create_context(
        config(workers={"count": 99, "num_cpus": 99}), address="local"
    ),
    "runtime_env without its folder": lambda: ray_fed.create_context(
        config(runtime_env={"working_dir": "/nowhere/at/all"}), address="local"
    ),
}


def measure() -> dict[str, int]:
    gc.collect()
    descriptors = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    loops = sum(not loop.is_closed() for loop in LOOPS)
    found = {"threads": threading.active_count(), "loops": loops}
    return {**found, "descriptors": descriptors, "ray": int(ray.is_initialized())}


def settle(before: dict[str, int]) -> dict[str, int]:
    """Return what is more than before, once it does not get less any more."""
    more: dict[str, int] = {}
    for _ in range(50):
        more = {key: count - before[key] for key, count in measure().items()}
        more = {key: count for key, count in more.items() if count > 0}
        if not more:
            break
        time.sleep(0.1)
    return more


def fail(build: Any) -> str:
    try:
        build()
    except Exception as error:  # noqa: BLE001 (the test says which)
        return f"{type(error).__name__}: {error}"[:200]
    return "nothing raised"


if __name__ == "__main__":
    report: dict[str, Any] = {}
    for cause, build in (LOCAL if sys.argv[1] == "local" else RAY).items():
        fail(build)
        before = measure()
        said = [fail(build), fail(build)][1]
        report[cause] = [said, settle(before)]
    sys.stdout.write(json.dumps(report) + "\n")
