"""What a worker asks for: in words, on which nodes, and how many fit."""

import pytest

import ray_fed
from ray_fed import errors
from ray_fed.cluster import inventory, pool

ALL = ray_fed.Workers(
    count=3,
    num_cpus=0.5,
    memory=3 * 2**29,
    accelerator_type="L4",
    label_selector={"zone": "in(a, b)"},
)


@pytest.mark.parametrize(
    ("term", "matched"),
    [
        ("a", ["a"]),
        ("!a", ["b", "inside", None]),
        ("in(a,b)", ["a", "b"]),
        ("!in(a,b)", ["inside", None]),
        ("inside", ["inside"]),
    ],
)
def test_labels_allow_nodes(term: str, matched: list[str | None]) -> None:
    demand = inventory.Demand({"CPU": 1.0}, {"zone": term})
    nodes: dict[str | None, dict[str, str]]
    nodes = {label: {"zone": label, "x": "y"} for label in ("a", "b", "inside")}
    nodes[None] = {"x": "y"}

    assert [label for label, node in nodes.items() if demand.allows(node)] == matched


def test_all_labels_must_match() -> None:
    demand = inventory.Demand({"CPU": 1.0}, {"zone": "a", "disk": "!slow"})

    assert demand.allows({"zone": "a", "disk": "fast"})
    assert not demand.allows({"zone": "a", "disk": "slow"})
    assert not demand.allows({"zone": "b", "disk": "fast"})


def test_demand_has_the_resources_that_ray_counts() -> None:
    demand = inventory.Demand.of(ray_fed.Config(workers=ALL))

    assert demand.resources == {
        "CPU": 0.5,
        "memory": 1.5 * 2**30,
        "accelerator_type:L4": 0.001,
    }
    assert str(demand) == (
        "0.5 CPU, 1.5 GiB memory, accelerator L4 on nodes with zone=in(a,b)"
    )


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"CPU": 4.0, "memory": 5 * 2**30, "accelerator_type:L4": 1.0}, 3),
        ({"CPU": 1.0, "memory": 5 * 2**30, "accelerator_type:L4": 1.0}, 2),
        ({"CPU": 4.0, "memory": 5 * 2**30}, 0),
        ({"CPU": 4.0, "accelerator_type:L4": 1.0}, 0),
    ],
    ids=["memory", "CPUs", "no accelerator", "no memory"],
)
def test_memory_and_accelerators_limit_the_pool(
    resources: dict[str, float], expected: int
) -> None:
    workers = ALL.model_copy(update={"count": None})
    config = ray_fed.Config(workers=workers)

    assert inventory.Demand.of(config).count_fitting(resources) == expected
    if expected:
        size = pool.decide_size(config, [resources], may_grow=False)
        assert (size.most, size.is_fixed) == (expected, True)


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (
            [{"CPU": 4.0, "memory": 2.0**31, "accelerator_type:L4": 1.0}],
            r"Expected 4\.5 GiB memory for 3 `workers`, found 2 GiB memory on nodes",
        ),
        (
            [{"CPU": 4.0, "memory": 2.0**33}],
            r"Expected accelerator L4 for 3 `workers`, found none on nodes with zone=",
        ),
        ([], r"Expected 1\.5 CPU for 3 `workers`, found none on nodes with zone=in"),
    ],
    ids=["memory", "accelerator", "labels"],
)
def test_missing_room_is_named(resources: list[dict[str, float]], message: str) -> None:
    with pytest.raises(errors.ResourceError, match=message):
        pool.decide_size(ray_fed.Config(workers=ALL), resources, may_grow=False)
