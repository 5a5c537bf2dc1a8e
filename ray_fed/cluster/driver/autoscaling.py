"""Asks whoever adds nodes to a cluster for more of them, and withdraws it.

Ray keeps one request a cluster, and each call replaces the one before. So that several
pools may ask, each notes its own in Ray's key-value store, and what is asked for is the
sum of all notes whose job lives. A program that calls `request_resources` itself is
overwritten, and overwrites: Ray does not say who asked. What a driver asked for that
was killed stands until the next pool of that cluster asks or withdraws.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray._private import state as ray_state  # no public name for jobs
from ray.autoscaler import sdk
from ray.experimental import internal_kv

_NAMESPACE = b"ray_fed"
_PREFIX = b"requests/"


def request(name: str, bundles: list[dict[str, float]]) -> None:
    """Ask for a cluster that holds these bundles, beside what others ask for.

    Args:
        name: of who asks, unique; replaces what it asked for before.
        bundles: resources of each of its workers, those that are there included;
            empty: withdraw.
    """
    job: str = ray.get_runtime_context().get_job_id()
    key = _PREFIX + f"{job}/{name}".encode()
    if bundles:
        _kv("put", key, json.dumps(bundles).encode(), overwrite=True)
    elif not _kv("del", key):
        return
    asked = _read_all()
    while True:  # whoever is last has read what all others wrote
        sdk.request_resources(bundles=[b for found in asked.values() for b in found])
        seen, asked = asked, _read_all()
        if seen == asked:
            return


def withdraw(name: str) -> None:
    """Ask for nothing any more."""
    request(name, [])


def _read_all() -> Mapping[bytes, list[dict[str, float]]]:
    """Return what is asked for, by key; drop what a job left that is over."""
    jobs = cast("list[dict[str, Any]]", ray_state.jobs())
    over = {job["JobID"] for job in jobs if job["IsDead"]}
    found: dict[bytes, list[dict[str, float]]] = {}
    for key in _kv("list", _PREFIX):
        if key.removeprefix(_PREFIX).split(b"/")[0].decode() in over:
            _kv("del", key)
            continue
        noted = _kv("get", key)
        if noted is not None:
            found[key] = json.loads(noted)
    return found


def _kv(verb: str, *args: Any, **options: Any) -> Any:
    method = getattr(internal_kv, f"_internal_kv_{verb}")
    return method(*args, namespace=_NAMESPACE, **options)
