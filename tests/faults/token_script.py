"""Joins the Ray that an address names, or that runs here; prints what comes of it."""

import json
import sys
from typing import Any

import ray

import ray_fed


def main(address: str | None) -> dict[str, Any]:
    try:
        with ray_fed.init(address, config=ray_fed.Config(progress=False)):
            return {"joined": ray.get_runtime_context().gcs_address}
    except ray_fed.errors.RayFedError as error:
        return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:] or [None]), sys.stdout)
