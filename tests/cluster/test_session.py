"""Connecting: what is not there is said at once."""

import pytest

import ray_fed
import ray_fed.errors as errors


def test_address_where_nothing_listens_is_refused_at_once() -> None:
    with pytest.raises(errors.ClusterError, match=r"a Ray at `127\.0\.0\.1:1`"):
        ray_fed.create_context(ray_fed.Config(), address="127.0.0.1:1")
