"""examples/clusters/rayjob.yaml, field by field, and what a job needs to go on alone.

The fields are those of the API reference of KubeRay's `ray.io/v1`, in docs/reference
of github.com/ray-project/kuberay; `AuthOptions` is from the page "KubeRay CRD API
reference" of docs.ray.io, for KubeRay 1.6.2 (both read 2026-11-25). What Kubernetes
itself defines, such as the template of a pod, is left out, but for containers.
"""

import pathlib
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import yaml

import ray_fed

ROOT = pathlib.Path(__file__).parents[1]
RAYJOB = ROOT / "examples" / "clusters" / "rayjob.yaml"

Check = str | Callable[[Any], bool]
"""The name of another kind, or a test of the value."""


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: Any) -> bool:
    return is_whole(value) or isinstance(value, float)


def is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def is_texts(value: Any) -> bool:
    return is_mapping(value) and all(map(is_text, [*value, *value.values()]))


def one_of(*names: str) -> Check:
    return lambda value: value in names


def fields(checks: dict[str, Check]) -> dict[str, Check]:
    """Return a check by field, of checks by all the fields that have it."""
    return {name: check for names, check in checks.items() for name in names.split()}


DOCUMENTED: dict[str, dict[str, Check]] = {
    "RayJob": {
        "apiVersion": one_of("ray.io/v1"),
        "kind": one_of("RayJob"),
        "metadata": is_mapping,
        "spec": "RayJobSpec",
    },
    "RayJobSpec": fields(
        {
            "activeDeadlineSeconds": lambda value: is_whole(value) and value > 0,
            "backoffLimit ttlSecondsAfterFinished": is_whole,
            "clusterSelector metadata": is_texts,
            "entrypoint entrypointResources jobId managedBy runtimeEnvYAML": is_text,
            "entrypointNumCpus entrypointNumGpus": is_number,
            "rayClusterSpec": "RayClusterSpec",
            "shutdownAfterJobFinishes suspend": is_switch,
            "submissionMode": one_of("K8sJobMode", "HTTPMode", "InteractiveMode"),
            "submitterConfig": "SubmitterConfig",
            "submitterPodTemplate": is_mapping,
        }
    ),
    "SubmitterConfig": {"backoffLimit": is_whole},
    "RayClusterSpec": fields(
        {
            "authOptions": "AuthOptions",
            "autoscalerOptions": "AutoscalerOptions",
            "enableInTreeAutoscaling suspend": is_switch,
            "gcsFaultToleranceOptions": is_mapping,
            "headGroupSpec": "HeadGroupSpec",
            "headServiceAnnotations": is_texts,
            "managedBy rayVersion": is_text,
            "workerGroupSpecs": "WorkerGroupSpec",
        }
    ),
    "AuthOptions": {
        "enableK8sTokenAuth": is_switch,
        "mode": one_of("disabled", "token"),
        "secretName": is_text,
    },
    "AutoscalerOptions": {
        "idleTimeoutSeconds": is_whole,
        "image": is_text,
        "resources": is_mapping,
        "upscalingMode": one_of("Conservative", "Default", "Aggressive"),
        "version": one_of("v1", "v2"),
    },
    "HeadGroupSpec": fields(
        {
            "enableIngress": is_switch,
            "headService template": is_mapping,
            "rayStartParams": is_texts,
            "serviceType": is_text,
        }
    ),
    "WorkerGroupSpec": fields(
        {
            "groupName": is_text,
            "idleTimeoutSeconds maxReplicas minReplicas numOfHosts replicas": is_whole,
            "rayStartParams": is_texts,
            "scaleStrategy template": is_mapping,
            "suspend": is_switch,
        }
    ),
}


def find_faults(found: Any, kind: str, path: str) -> list[str]:
    """Return where a document is not what the table says."""
    if isinstance(found, list):
        members = enumerate(found)
        return [f for i, m in members for f in find_faults(m, kind, f"{path}[{i}]")]
    faults: list[str] = []
    for name, value in found.items():
        check = DOCUMENTED[kind].get(name)
        if check is None:
            faults.append(f"{path}.{name}: no field of {kind}")
        elif isinstance(check, str):
            faults += find_faults(value, check, f"{path}.{name}")
        elif not check(value):
            faults.append(f"{path}.{name}: {value!r}")
    return faults


@pytest.fixture
def job() -> dict[str, Any]:
    return yaml.safe_load(RAYJOB.read_text(encoding="utf-8"))


@pytest.fixture
def cluster(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["rayClusterSpec"]


def containers(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [each for g in groups for each in g["template"]["spec"]["containers"]]


def test_every_field_is_documented(job: dict[str, Any]) -> None:
    assert find_faults(job, "RayJob", "") == []


def test_job_is_tried_again_and_goes_on_from_storage(job: dict[str, Any]) -> None:
    program, command, *arguments = shlex.split(job["spec"]["entrypoint"])
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))

    assert (program, command) == ("ray-fed", "demo")
    assert options.keys() == {"--address", "--rounds", "--storage-path"}
    assert options["--address"] == "auto"
    assert options["--storage-path"].startswith("s3://")
    assert job["spec"]["backoffLimit"] > 0
    assert job["spec"]["shutdownAfterJobFinishes"]


def test_settings_of_the_job_are_settings(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    config = ray_fed.Config.load()

    assert config.workers.count == (1, 8)
    assert config.progress == "on"


def test_cluster_has_tokens_and_scales_groups_of_cpus_and_gpus(
    cluster: dict[str, Any],
) -> None:
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    bounds = {
        group["groupName"]: (group["minReplicas"], group["maxReplicas"])
        for group in cluster["workerGroupSpecs"]
    }
    assert bounds == {"cpu": (1, 8), "gpu": (0, 4)}
    gpus = [
        "nvidia.com/gpu" in each["resources"]["limits"] for each in containers(cluster)
    ]
    assert gpus == [False, False, True]


def test_pods_have_the_time_that_a_run_needs_to_save(cluster: dict[str, Any]) -> None:
    for group in cluster["workerGroupSpecs"]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= 20
