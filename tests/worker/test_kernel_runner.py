"""Clients folded by one graph, in calls that cover some of them, and the graphs."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.plan.plans as plans
import ray_fed.tensorflow.kernels.client_kernel as client_kernel
import ray_fed.tensorflow.kernels.server_kernels as server_kernels
import ray_fed.worker.kernel_runner as kernel_runner
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.language import blocks
from ray_fed.plan import diagnostics, random_keys
from ray_fed.plan.random_keys import DrawKey
from ray_fed.program import ClientData
from ray_fed.tensorflow.kernels.client_kernel import ClientKernel
from ray_fed.tensorflow.kernels.server_kernels import KernelCache
from ray_fed.values import read_limits
from ray_fed.values.client_references import ClientRun
from ray_fed.worker.stacks import DeviceStack, Pace
from tests.stages import kernel_of, stage_of

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


@rtf.computation(np.int32)
def draw_often(x: Any) -> Any:
    for _ in tf.range(x):
        x += tf.random.uniform([], maxval=2, dtype=tf.int32)
    return x


@fl.federated_computation(AT_CLIENTS)
def drawn_in_a_loop(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(draw_often, data))


@fl.federated_computation(AT_CLIENTS)
def checked(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(check, data))


@fl.federated_computation(AT_CLIENTS)
def doubled(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(double, data))


@rtf.computation(np.int32, np.int32)
def add(x: Any, y: Any) -> Any:
    return x + y


@fl.federated_computation(AT_CLIENTS, AT_CLIENTS)
def added(data: Any, more: Any) -> Any:
    return fl.federated_sum(fl.federated_map(add, (data, more)))


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
        merge=blocks.serialize(stage_of(doubled).merge.to_building_block()),
        clients_per_leaf=2,
        first_leaf=0,
        leaves=tuple(leaves),
        draw=DrawKey(0, 0),
        subtrees=((0, len(leaves)),),
        kernel=kernel,
        call_s=5.0,
    )


@pytest.mark.parametrize(
    ("noted", "remaining", "count"),
    [
        pytest.param(None, 32, 1, id="the first call is of one client"),
        pytest.param((1, 0.5), 32, 10, id="later ones fill their seconds"),
        pytest.param((1, 0.5), 3, 3, id="as far as there are clients"),
        pytest.param((4, 80.0), 32, 1, id="slow clients run one by one"),
        pytest.param((1, 0.0), 32, 32, id="no time at all"),
    ],
)
def test_call_covers_as_many_clients_as_its_seconds_allow(
    noted: tuple[int, float] | None, remaining: int, count: int
) -> None:
    pace = Pace()
    if noted is not None:
        pace.note(*noted)

    assert pace.count(remaining, 5.0) == count


def test_each_stack_has_a_pace_of_its_own() -> None:
    first, second = stacks.device_stack(), stacks.device_stack()

    assert first.pace_of(b"fold") is first.pace_of(b"fold")
    assert first.pace_of(b"fold") is not second.pace_of(b"fold")
    first.close()
    second.close()


class TestKernels:
    def test_same_content_is_built_once(self) -> None:
        graphs = KernelCache(None)

        built = graphs.clients(kernel_of(doubled), None)

        assert graphs.clients(kernel_of(doubled), None) is built
        graphs.close()

    @pytest.mark.parametrize(
        ("comp", "is_one"),
        [(doubled, True), (checked, True), (drawn, True), (drawn_in_a_loop, False)],
    )
    def test_threads_share_a_graph_that_keeps_no_random_states(
        self, comp: Any, is_one: bool
    ) -> None:
        kernel = kernel_of(comp)

        built = [KernelCache(None).clients(kernel, None) for _ in range(2)]

        assert (built[0] is built[1]) == is_one

    def test_least_recently_used_is_closed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server_kernels, "_CACHED_GRAPHS", 2)
        closed: list[Any] = []

        def close(graph: ClientKernel) -> None:
            closed.append(graph)

        monkeypatch.setattr(ClientKernel, "close", close)
        graphs = KernelCache(None)
        kernels = [scaled(factor) for factor in (2, 3, 4)]
        built = [graphs.clients(kernels[index], None) for index in (0, 1, 0, 2)]

        assert closed == [built[1]]
        assert graphs.clients(kernels[0], None) is built[0]

    def test_refusal_is_told_again(self) -> None:
        graphs = KernelCache(None)
        for _ in range(2):
            told = graphs.merge(b"no computation")

            assert isinstance(told, plans.Fallback)
            assert told.reason.startswith("CompileError: ")

    def test_error_of_tensorflow_is_noted_whenever_the_refusal_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise ValueError("TensorFlow has no such graph.")

        monkeypatch.setattr(tf, "while_loop", refuse)
        graphs, kernel = KernelCache(None), scaled(5)
        reason = "ValueError: TensorFlow has no such graph."
        for _ in range(2):
            with diagnostics.noting() as noted:
                assert graphs.clients(kernel, None) == plans.Fallback(reason)

            assert noted == {diagnostics.WorkInterpreted("the work of clients", reason)}

    def test_mistake_of_ray_fed_is_no_refusal(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(client_kernel.ClientWork, "fold")

        with pytest.raises(AttributeError, match="fold"):
            KernelCache(None).clients(scaled(6), None)


class TestRunKernel:
    @pytest.fixture
    def leaf(self) -> Any:
        leaf = stacks.device_stack()
        yield leaf
        leaf.close()

    async def run(self, leaf: DeviceStack, work: plans.Subround, data: Any) -> Any:
        ran = await kernel_runner.run_leaves(leaf, work, [np.int32(0)], data)
        if isinstance(ran, plans.Fallback):
            return ran
        partials: list[Any] = ran.values
        return [list(partial) for partial in partials]

    def test_partials_of_leaves_are_merged(self, leaf: DeviceStack) -> None:
        work = subround(kernel_of(doubled), [range(2), range(2, 3)])
        data = [[np.int32(value) for value in (1, 2, 3)]]

        assert asyncio.run(self.run(leaf, work, data)) == [[12]]

    @pytest.mark.parametrize("laid_bytes", [1, 8, 2**20])
    def test_clients_of_a_later_subround_are_found(
        self, leaf: DeviceStack, monkeypatch: pytest.MonkeyPatch, laid_bytes: int
    ) -> None:
        monkeypatch.setattr(kernel_runner, "LAID_BYTES", laid_bytes)
        work = subround(kernel_of(doubled), [range(6, 8), range(8, 9)])
        data = [[np.int32(value) for value in (1, 2, 3)]]

        assert asyncio.run(self.run(leaf, work, data)) == [[12]]

    def test_freed_scope_ends_the_run(self, leaf: DeviceStack) -> None:
        def check() -> None:
            raise errors.ClusterError("Expected an open scope, found it freed.")

        work = subround(kernel_of(doubled), [range(1)])

        with (
            read_limits.limited(read_limits.limits(), check),
            pytest.raises(errors.ClusterError, match="freed"),
        ):
            asyncio.run(self.run(leaf, work, [[np.int32(1)]]))

    def test_leaf_that_raises_is_told(
        self, leaf: DeviceStack, monkeypatch: pytest.MonkeyPatch
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

        assert ran == plans.Fallback("RuntimeError in a kernel", 1)

    def test_leaf_that_raises_is_told_where_a_call_covers_several(
        self, leaf: DeviceStack
    ) -> None:
        leaves = [range(1), range(1, 3), range(3, 3), range(3, 5), range(5, 6)]
        work = subround(kernel_of(checked), leaves)
        data = [[np.int32(value) for value in (1, 2, 3, 4, -5, -6)]]

        ran = asyncio.run(self.run(leaf, work, data))

        assert ran == plans.Fallback("InvalidArgumentError in a kernel", 3)

    @pytest.mark.parametrize("comp", [doubled, drawn, checked])
    def test_leaves_of_one_client_have_the_bits_of_any(
        self, leaf: DeviceStack, comp: Any
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

    def test_clients_that_come_again_are_laid_once_beside_values_that_change(
        self, leaf: DeviceStack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        laid: list[int] = []
        lay_part = ClientKernel.lay_part

        def noting(kernel: ClientKernel, part: int, values: Any, keep: Any) -> Any:
            laid.append(part)
            return lay_part(kernel, part, values, keep)

        monkeypatch.setattr(ClientKernel, "lay_part", noting)
        held = ClientData.from_values([np.int32(10**i) for i in range(4)], np.int32)
        run = ClientRun(held.source, held.type_signature, held.positions)
        work = subround(kernel_of(added), [range(2), range(2, 4)])

        found = [
            asyncio.run(self.run(leaf, work, [run, [np.int32(more)] * 4]))
            for more in (1, 2, 3)
        ]

        assert found == [[[1115]], [[1119]], [[1123]]]
        assert laid == [0, 1, 0, 1, 1]

    @pytest.mark.parametrize("laid_bytes", [1, 8, 2**20], ids="{} bytes laid".format)
    def test_subtrees_are_merged_whatever_a_call_covers(
        self, leaf: DeviceStack, monkeypatch: pytest.MonkeyPatch, laid_bytes: int
    ) -> None:
        monkeypatch.setattr(kernel_runner, "LAID_BYTES", laid_bytes)
        leaves = [range(i, i + 1) for i in range(7)]
        work = dataclasses.replace(
            subround(kernel_of(doubled), leaves),
            first_leaf=3,
            subtrees=((3, 4), (4, 8), (8, 10)),
        )
        data = [[np.int32(10**i) for i in range(7)]]

        found = asyncio.run(self.run(leaf, work, data))

        assert found == [[2], [22220], [2200000]]
