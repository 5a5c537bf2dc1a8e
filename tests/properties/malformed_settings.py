"""Settings with numbers that may be none, and files that may be no YAML."""

# pyright: reportUnknownLambdaType=false

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from ray_fed import Config
from tests.properties.malformed import (
    REFUSED,
    Case,
    Either,
    Expected,
    Place,
    Right,
    damaged,
)

NUMBERS: tuple[Any, ...] = (
    0, 1, 2, 7, -1, 1.0, 0.5, 1e-9, 2.5, True, None, "2", "x", math.nan, math.inf,
    -math.inf, 2**31, 2**63, 10**30, 10**400, 1j, [], {}, (1, 2), (2, 1), (1, math.nan),
    b"1", "\ud800",
)  # fmt: skip
WHOLE_FROM = {
    "subrounds": 1, "clients_per_leaf": 1, "default_num_clients": 0, "kept_bytes": 0,
    "max_dropped_clients": 0, "retry.crash": 0, "retry.hang": 0,
    "workers.client_bytes": 0, "kernels.vectorised_clients": 1,
}  # fmt: skip
"""Settings that are counts, and the least one; all of them below 2**63."""

REAL_FROM = {
    "workers.num_cpus": 1e-4, "workers.num_gpus": 0, "workers.resources.tpu": 0,
    "workers.start_timeout_s": 0, "subrounds.timeout_s": 0, "stragglers.min_s": 0,
    "kernels.call_s": 0,
}  # fmt: skip
OPTIONAL = {"clients_per_leaf", "subrounds.timeout_s"}
POSITIVE = {name for name in REAL_FROM if name.endswith("_s")}


def _expected_setting(name: str, value: Any) -> Expected:
    if value is None:
        return Right(None) if name in OPTIONAL else REFUSED
    if name in WHOLE_FROM:
        if name == "subrounds" and value == {}:
            return Right(None)
        is_right = type(value) is int and WHOLE_FROM[name] <= value < 2**63
        if is_right and value >= 2**31 and not name.endswith("bytes"):
            return REFUSED
        return Right(value) if is_right else REFUSED
    if value == "2":
        return Right(2.0)  # as YAML reads 1e3
    is_number = type(value) in (int, float) and math.isfinite(min(value, 10**300))
    if not is_number or value > 2**31 or (name.endswith("_s") and value > 10**9):
        return REFUSED
    if name == "workers.num_gpus" and value > 1:
        return REFUSED
    is_real = value >= REAL_FROM[name] and (value > 0 or name not in POSITIVE)
    is_real = is_real and (value == 0 or value >= 1e-4 or name in POSITIVE)
    return Right(float(value)) if is_real else REFUSED


def settings(generator: random.Random, place: Place) -> Iterator[Case]:
    """Yield settings with numbers that may be none, and files that may be no YAML."""
    path = place.folder / "settings.yaml"
    text = b"backend: local\nworkers: {count: 2, num_cpus: 0.5}\nretry: {crash: 7}\n"
    while True:
        if generator.random() < 0.35:
            content = damaged(generator, text)
            label = repr(content)
            run = lambda content=content: _loaded(path, content)  # noqa: E731
            yield Case("setting", label, run, Either(lambda found: found is not None))
            continue
        name = generator.choice([*WHOLE_FROM, *REAL_FROM])
        value = generator.choice(NUMBERS)
        run = lambda name=name, value=value: _set(name, value)  # noqa: E731
        yield (
            Case(
                "setting", f"{name}={value!r:.40}", run, _expected_setting(name, value)
            )
            if value != 10**400
            else Case("setting", f"{name} of 400 digits", run, REFUSED)
        )


def _set(name: str, value: Any) -> Any:
    for part in reversed(name.split(".")):
        value = {part: value}
    found: Any = Config(**value)
    for part in name.split("."):
        found = found[part] if isinstance(found, Mapping) else getattr(found, part)
    return found.count if name == "subrounds" else found


def _loaded(path: Any, content: bytes) -> Config:
    path.write_bytes(content)
    return Config.load(path)
