"""cluster.yaml is what `ray up` takes, and opens nothing to the world."""

import copy
import importlib.util
import json
import pathlib
import re
from typing import Any

import jsonschema
import pytest
import yaml

CLUSTER_YAML = pathlib.Path(__file__).parent.parent / "cluster.yaml"


@pytest.fixture
def cluster() -> dict[str, Any]:
    """The file, as a copy to change."""
    return copy.deepcopy(yaml.safe_load(CLUSTER_YAML.read_text(encoding="utf-8")))


@pytest.fixture
def schema() -> dict[str, Any]:
    """The schema that `ray up` checks with, from the package; no Ray is started."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    path = pathlib.Path(spec.origin).parent / "autoscaler" / "ray-schema.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _starts(cluster: dict[str, Any], kind: str) -> str:
    """The command that starts Ray on a head or a worker."""
    (start,) = (
        command
        for command in cluster[f"{kind}_start_ray_commands"]
        if "ray start" in command
    )
    return start


def test_file_follows_rays_schema(
    cluster: dict[str, Any], schema: dict[str, Any]
) -> None:
    jsonschema.validate(cluster, schema)


def test_misspelled_key_is_refused(
    cluster: dict[str, Any], schema: dict[str, Any]
) -> None:
    for path in ([], ["docker"], ["auth"], ["available_node_types", "gpu"]):
        changed = level = copy.deepcopy(cluster)
        for key in path:
            level = level[key]
        level["max_wrokers"] = 2

        with pytest.raises(jsonschema.ValidationError, match="max_wrokers"):
            jsonschema.validate(changed, schema)


def test_head_runs_no_client_work(cluster: dict[str, Any]) -> None:
    head = cluster["available_node_types"][cluster["head_node_type"]]

    assert head["resources"]["CPU"] == 0
    assert not head["resources"].get("GPU")


def test_no_security_group_opens_a_port(cluster: dict[str, Any]) -> None:
    assert "security_group" not in cluster["provider"]
    for node_type in cluster["available_node_types"].values():
        assert not {"SecurityGroupIds", "SecurityGroups", "NetworkInterfaces"} & set(
            node_type["node_config"]
        )


def test_every_process_of_every_node_authenticates(cluster: dict[str, Any]) -> None:
    for kind in ("head", "worker"):
        start = _starts(cluster, kind)
        assert start.startswith("RAY_AUTH_MODE=token ray start ")
    assert "--env RAY_AUTH_MODE=token" in cluster["docker"]["run_options"]
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "RAY_AUTH_TOKEN=" not in CLUSTER_YAML.read_text(encoding="utf-8")


def test_dashboard_listens_on_loopback_alone(cluster: dict[str, Any]) -> None:
    hosts = re.findall(r"--dashboard-host[= ](\S+)", _starts(cluster, "head"))

    assert hosts == ["127.0.0.1"]
    assert "0.0.0.0" not in CLUSTER_YAML.read_text(encoding="utf-8")


def test_images_of_all_groups_share_versions(cluster: dict[str, Any]) -> None:
    images = [cluster["docker"]["image"]] + [
        node_type["docker"]["worker_image"]
        for node_type in cluster["available_node_types"].values()
        if "docker" in node_type
    ]

    assert len({re.sub("-(cpu|gpu)$", "", image) for image in images}) == 1
    (version,) = re.findall(r":(\d+)\.(\d+)\.\d+-py311", images[0])
    assert tuple(map(int, version)) >= (2, 52)  # the first with tokens


def test_every_node_installs_the_wheel_that_is_copied_to_it(
    cluster: dict[str, Any],
) -> None:
    gpu = cluster["available_node_types"]["gpu"]
    folder = "~/ray_fed_wheel"

    assert cluster["file_mounts"][folder] == "dist"
    for commands in (cluster["setup_commands"], gpu["worker_setup_commands"]):
        (command,) = commands
        wheel = f"$(ls -t {folder}/ray_fed-*.whl | head -n 1)[cluster]"
        assert command.startswith(f'pip install "{wheel}"')
