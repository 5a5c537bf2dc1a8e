"""What an executor is given of a GPU: TensorFlow's own settings are played."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from ray_fed.tensorflow.tensors import devices

CARD_MIB = 40_000
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


@dataclasses.dataclass
class PlayedTensorFlow:
    """TensorFlow's device settings on a machine with some GPUs; notes what is set."""

    num_gpus: int
    visible: list[str] = dataclasses.field(default_factory=list[str])
    limits_mib: list[int] = dataclasses.field(default_factory=list[int])
    is_deterministic: bool = False

    def list_physical_devices(self, kind: str) -> list[str]:
        assert kind == "GPU"
        return [f"card {index}" for index in range(self.num_gpus)]

    def list_logical_devices(self, kind: str) -> list[str]:
        return [f"{kind} 0"]

    def set_visible_devices(self, found: list[str], kind: str) -> None:
        assert kind == "GPU"
        self.visible = found

    def set_logical_device_configuration(self, card: str, parts: list[Any]) -> None:
        assert card == "card 0"
        self.limits_mib = [part.memory_limit for part in parts]

    def LogicalDeviceConfiguration(self, memory_limit: int) -> Any:  # noqa: N802
        return SimpleNamespace(memory_limit=memory_limit)

    @property
    def experimental(self) -> Any:
        return SimpleNamespace(enable_op_determinism=self._determine)

    def _determine(self) -> None:
        self.is_deterministic = True


def configure(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, fraction: float
) -> tuple[Any, PlayedTensorFlow]:
    played = PlayedTensorFlow(num_gpus)

    def run(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(stdout=f"{CARD_MIB}\n")

    monkeypatch.setattr(devices, "tf", SimpleNamespace(config=played))
    monkeypatch.setattr(devices, "set_threads", lambda _: True)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(subprocess, "run", run)
    return devices.configure(1, fraction), played


@pytest.mark.parametrize(
    ("fraction", "limits_mib"),
    [(0.5, [18_976]), (0.25, [8_976]), (0.02, [400]), (1.0, [])],
)
def test_fraction_of_a_gpu_is_a_limit_of_tensors_and_libraries(
    monkeypatch: pytest.MonkeyPatch, fraction: float, limits_mib: list[int]
) -> None:
    device, played = configure(monkeypatch, num_gpus=2, fraction=fraction)

    assert (device, played.visible) == ("GPU 0", ["card 0"])
    assert played.limits_mib == limits_mib
    assert played.is_deterministic


def test_executor_without_a_gpu_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    device, played = configure(monkeypatch, num_gpus=2, fraction=0.0)

    assert (device, played.visible, played.limits_mib) == ("CPU 0", [], [])


@pytest.mark.parametrize(
    ("num_threads", "is_told"), [(1, False), (3, True)], ids=["the same", "others"]
)
def test_threads_that_are_fixed_to_others_are_told(
    caplog: pytest.LogCaptureFixture, num_threads: int, is_told: bool
) -> None:
    float(tf.add(1.0, 1.0))  # fixes those of this process, which has one

    is_set = devices.set_threads(num_threads)

    assert is_set is not is_told
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == is_told
    assert all("other threads than the 3 that workers have" in one for one in told)
    assert all("Start a new process" in one for one in told)


@pytest.mark.parametrize(
    ("given", "found"), [({}, "true"), ({GROWTH: "false"}, "false")], ids=["", "set"]
)
def test_import_has_tensorflow_take_a_card_by_need_unless_told(
    given: dict[str, str], found: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != GROWTH} | given
    show = f"import os, ray_fed; print(os.environ[{GROWTH!r}])"

    ran = subprocess.run(
        [sys.executable, "-c", show],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout.split() == [found]


def run_alone(script: str, *arguments: str) -> Any:
    """Return what a script prints as JSON, in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout)


SPLIT = """
import json, os, sys
import tensorflow as tf
from ray_fed.tensorflow.tensors import devices

NUM_THREADS = 20
tf.config.threading.set_intra_op_parallelism_threads(NUM_THREADS)
tf.config.threading.set_inter_op_parallelism_threads(1)
if sys.argv[1] == "by the user":
    parts = [tf.config.LogicalDeviceConfiguration()] * 2
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, parts)
before, given = len(os.listdir("/proc/self/task")), dict(os.environ)
found = [device.name for device in devices.split_cpu(3)]
started = len(os.listdir("/proc/self/task")) - before
print(json.dumps([found, started >= 3 * NUM_THREADS, given == dict(os.environ)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "places", "has_own_threads"),
    [
        ("in time", [0, 1, 2], True),
        ("by the user", [0, 1, 0], False),
    ],
)
def test_executors_that_share_a_process_have_a_cpu_device_each(
    how: str, places: list[int], *, has_own_threads: bool
) -> None:
    found, starts_three_times_the_threads, leaves_the_environment = run_alone(
        SPLIT, how
    )

    assert found == [f"/device:CPU:{place}" for place in places]
    assert starts_three_times_the_threads == has_own_threads
    assert leaves_the_environment
