"""Kernels on a leaf stack: how many clients a call covers, and what is kept."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.language import blocks
from ray_fed.plan import plans, random_keys
from ray_fed.plan.random_keys import DrawKey
from ray_fed.tensorflow.kernels.client_kernel import ClientKernel
from ray_fed.worker import kernel_cache, kernel_runs, stacks
from ray_fed.worker.kernel_cache import KernelCache, Pace
from ray_fed.worker.kernel_runs import LeafStack
from tests.stages import kernel_of, stage_of

NO_MERGE = plans.NoKernel("no merge")
AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)


@rtf.computation(np.int32)
def double(x: Any) -> Any:
    return x * 2


@rtf.computation(np.int32)
def check(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_non_negative(x)]):
        return tf.identity(x)


@rtf.computation(np.int32)
def draw(x: Any) -> Any:
    return x + tf.random.uniform([], maxval=2**20, dtype=tf.int32)


@fl.federated_computation(AT_CLIENTS)
def drawn(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(draw, data))


@fl.federated_computation(AT_CLIENTS)
def checked(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(check, data))


@fl.federated_computation(AT_CLIENTS)
def doubled(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(double, data))


def scaled(factor: int) -> plans.Kernel:
    @rtf.computation(np.int32)
    def scale(x: Any) -> Any:
        return x * factor

    @fl.federated_computation(AT_CLIENTS)
    def run(data: Any) -> Any:
        return fl.federated_sum(fl.federated_map(scale, data))

    return kernel_of(run)


def subround(kernel: plans.Kernel, leaves: Sequence[range]) -> plans.Subround:
    return plans.Subround(
        computation=b"",
        merge=blocks.serialise(stage_of(doubled).merge.to_building_block()),
        clients_per_leaf=2,
        first_leaf=0,
        leaves=tuple(leaves),
        draw=DrawKey(0, 0),
        subtrees=((0, len(leaves)),),
        kernel=kernel,
        call_s=5.0,
    )


class TestPace:
    def test_first_call_is_of_one_client(self) -> None:
        assert Pace().count(32, 5.0) == 1

    def test_later_calls_fill_their_seconds(self) -> None:
        pace = Pace()
        pace.note(1, 0.5)

        assert [pace.count(32, 5.0), pace.count(3, 5.0)] == [10, 3]

    def test_slow_clients_run_one_by_one(self) -> None:
        pace = Pace()
        pace.note(4, 80.0)

        assert pace.count(32, 5.0) == 1

    def test_no_time_at_all_covers_what_is_left(self) -> None:
        pace = Pace()
        pace.note(1, 0.0)

        assert pace.count(32, 5.0) == 32


class TestKernelCache:
    def test_same_content_is_built_once(self) -> None:
        cache = KernelCache(None)
        first, again = kernel_of(doubled), kernel_of(doubled)

        loaded = cache.load(first, NO_MERGE)

        assert cache.load(again, NO_MERGE) is loaded
        cache.close()

    @pytest.mark.parametrize(
        ("comp", "is_one"), [("doubled", True), ("checked", False)]
    )
    def test_threads_share_a_graph_without_state(self, comp: str, is_one: bool) -> None:
        caches = [KernelCache(None), KernelCache(None)]
        kernel = kernel_of({"doubled": doubled, "checked": checked}[comp])

        loaded: list[Any] = [cache.load(kernel, NO_MERGE) for cache in caches]

        assert (loaded[0][0] is loaded[1][0]) == is_one
        assert loaded[0][1] is not loaded[1][1]

    def test_least_recently_used_is_closed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernel_cache, "_CACHED_KERNELS", 2)
        closed: list[Any] = []

        def close(graph: ClientKernel) -> None:
            closed.append(graph)

        monkeypatch.setattr(ClientKernel, "close", close)
        cache = KernelCache(None)
        kernels = [scaled(factor) for factor in (2, 3, 4)]
        graphs: list[Any] = [
            cache.load(kernels[index], NO_MERGE) for index in (0, 1, 0, 2)
        ]

        assert closed == [graphs[1][0]]
        assert cache.load(kernels[0], NO_MERGE) is graphs[0]


class TestRunKernel:
    @pytest.fixture
    def leaf(self) -> Any:
        leaf = stacks.leaf_stack()
        yield leaf
        leaf.close()

    async def run(
        self, leaf: LeafStack, work: plans.Subround, data: Any, **options: Any
    ) -> Any:
        ran = await leaf.run_kernel(work, [np.int32(0)], data, **options)
        if isinstance(ran, plans.NoKernel):
            return ran
        return [list(partial) for partial in ran.partials]

    def test_partials_of_leaves_are_merged(self, leaf: LeafStack) -> None:
        work = subround(kernel_of(doubled), [range(2), range(2, 3)])
        data = [[np.int32(value) for value in (1, 2, 3)]]

        assert asyncio.run(self.run(leaf, work, data)) == [[12]]

    @pytest.mark.parametrize("laid_bytes", [1, 8, 2**20])
    def test_clients_of_a_later_subround_are_found(
        self, leaf: LeafStack, monkeypatch: pytest.MonkeyPatch, laid_bytes: int
    ) -> None:
        monkeypatch.setattr(kernel_runs, "_LAID_BYTES", laid_bytes)
        work = subround(kernel_of(doubled), [range(6, 8), range(8, 9)])
        data = [[np.int32(value) for value in (1, 2, 3)]]

        assert asyncio.run(self.run(leaf, work, data)) == [[12]]

    def test_freed_scope_ends_the_run(self, leaf: LeafStack) -> None:
        def check() -> None:
            raise errors.ClusterError("Expected an open scope, found it freed.")

        work = subround(kernel_of(doubled), [range(1)])

        with pytest.raises(errors.ClusterError, match="freed"):
            asyncio.run(self.run(leaf, work, [[np.int32(1)]], check=check))

    def test_leaf_that_raises_is_told(
        self, leaf: LeafStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = ClientKernel.run
        calls: list[Any] = []

        def fail_third(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 3:
                raise RuntimeError("broken")
            return run(*args)

        monkeypatch.setattr(ClientKernel, "run", fail_third)
        work = subround(kernel_of(doubled), [range(1), range(1, 3)])
        data = [[np.int32(value) for value in (1, 2, 3)]]
        work_by_one = dataclasses.replace(work, call_s=1e-9)

        ran = asyncio.run(self.run(leaf, work_by_one, data))

        assert ran == plans.NoKernel("RuntimeError in a kernel", 1)

    def test_leaf_that_raises_is_told_where_a_call_covers_several(
        self, leaf: LeafStack
    ) -> None:
        leaves = [range(1), range(1, 3), range(3, 3), range(3, 5), range(5, 6)]
        work = subround(kernel_of(checked), leaves)
        data = [[np.int32(value) for value in (1, 2, 3, 4, -5, -6)]]

        ran = asyncio.run(self.run(leaf, work, data))

        assert ran == plans.NoKernel("InvalidArgumentError in a kernel", 3)

    @pytest.mark.parametrize("comp", [doubled, drawn, checked])
    def test_leaves_of_one_client_have_the_bits_of_any(
        self, leaf: LeafStack, comp: Any
    ) -> None:
        leaves = [range(i, i + 1) for i in range(5)]
        work = subround(kernel_of(comp), leaves)
        by_one = dataclasses.replace(work, clients_per_leaf=1)
        last_dropped = dataclasses.replace(
            by_one, leaves=(*leaves, range(5, 5)), subtrees=((0, 6),)
        )
        data = [[np.int32(10**i) for i in range(5)]]

        with random_keys.using(work.draw):
            found = [
                asyncio.run(self.run(leaf, cut, data))
                for cut in (work, by_one, last_dropped)
            ]

        assert found[0] == found[1] == found[2]
        assert found[0][0][0] >= 11111

    @pytest.mark.parametrize("laid_bytes", [1, 8, 2**20], ids="{} bytes laid".format)
    def test_subtrees_are_merged_whatever_a_call_covers(
        self, leaf: LeafStack, monkeypatch: pytest.MonkeyPatch, laid_bytes: int
    ) -> None:
        monkeypatch.setattr(kernel_runs, "_LAID_BYTES", laid_bytes)
        leaves = [range(i, i + 1) for i in range(7)]
        work = dataclasses.replace(
            subround(kernel_of(doubled), leaves),
            first_leaf=3,
            subtrees=((3, 4), (4, 8), (8, 10)),
        )
        data = [[np.int32(10**i) for i in range(7)]]

        found = asyncio.run(self.run(leaf, work, data))

        assert found == [[2], [22220], [2200000]]
