"""A subround of a kernel, or a finish, is one call of each of its workers."""

# pyright: reportPrivateUsage=false

import asyncio
import dataclasses
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.plan.plans as plans
import ray_fed.values.plain_values as plain_values
from ray_fed import tensorflow as rtf
from ray_fed.cluster import object_store
from ray_fed.cluster.subround import Attempts, Terms, Work
from ray_fed.compiler.fuse import fuse
from ray_fed.compiler.split import compile_to_chain
from ray_fed.language import blocks, type_checks
from ray_fed.plan.random_keys import DrawKey
from ray_fed.values import stored
from tests.cluster.conftest import FakeHandle
from tests.stages import stage_of

SEQUENCES = fl.FederatedType(fl.SequenceType(np.int32), fl.CLIENTS)
AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
DATA = stored.StoredClients(tuple(np.int32(n) for n in (9, 1, 2, 3)), 1, 4)
"""Fake handles take values for references, which must be hashable."""

TERMS = Terms(
    workers=(),
    num_own=1,
    budgets={"crash": 1},
    timeout_s=None,
    wait_s=1.0,
    fingerprint=None,
    each="1 CPU",
    submitted=0.0,
)


@rtf.computation(np.int32)
def double(x: Any) -> Any:
    return x * 2


@rtf.computation(fl.SequenceType(np.int32))
def keep(xs: Any) -> Any:
    return xs.shuffle(1)  # draws, and keeps the order


@rtf.computation(fl.SequenceType(np.int32))
def add_up(xs: Any) -> Any:
    return xs.reduce(0, tf.add)


@fl.federated_computation(AT_CLIENTS)
def doubled(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(double, data))


@fl.federated_computation(SEQUENCES)
def without_kernel(data: Any) -> Any:
    return fl.federated_sum(fl.federated_map(add_up, fl.federated_map(keep, data)))


def subround_of(comp: Any) -> plans.Subround:
    stage = stage_of(comp)
    return plans.Subround(
        computation=blocks.serialize_computation(stage.up_to_merge),
        merge=blocks.serialize_computation(stage.merge),
        clients_per_leaf=2,
        first_leaf=0,
        leaves=(range(2), range(2, 3)),
        draw=DrawKey(0, 0),
        subtrees=((0, 2),),
        kernel=fuse(stage.up_to_merge),
        call_s=5.0,
    )


@pytest.fixture
def handle(handles: list[FakeHandle]) -> FakeHandle:
    return handles[0]


def share(handles: list[FakeHandle], comp: Any, arg: Any) -> Any:
    """Run a plan on workers."""
    workers = tuple((f"worker {i}", h._describe()) for i, h in enumerate(handles))
    terms = dataclasses.replace(TERMS, workers=workers, num_own=len(handles))
    attempts = Attempts(handles, Work.of("scope", terms, comp, arg))
    return asyncio.run(attempts.run())


def work(handle: FakeHandle, comp: Any, arg: Any) -> Any:
    return share([handle], comp, arg)


def decoded(found: Any) -> list[Any]:
    return list(map(object_store.decode, found[1]))


def test_kernel_subround_is_one_call(handle: FakeHandle) -> None:
    found = work(handle, subround_of(doubled), DATA)

    assert decoded(found) == [(np.int32(12),)]
    assert found[0].kernel_leaves == 2
    assert handle.calls == ["evaluate"]


def test_what_no_graph_can_do_is_interpreted_in_that_call(handle: FakeHandle) -> None:
    clients = plain_values.to_plain([[1, 2], [3], []], SEQUENCES)

    found = work(handle, subround_of(without_kernel), clients)

    assert decoded(found) == [(np.int32(6),)]
    assert found[0].no_kernel == "a random op in a sequence result"
    assert handle.calls == ["evaluate"]


def test_finish_is_one_call(handle: FakeHandle) -> None:
    comp: Any = doubled
    chain = compile_to_chain(comp)
    partial = type_checks.member_type(
        stage_of(doubled).up_to_merge.type_signature.result
    )
    finish = plans.Finish(
        merge=blocks.serialize_computation(stage_of(doubled).merge),
        subtrees=((0, 1), (1, 2)),
        partial_type=blocks.serialize_type(partial),
        computation=blocks.serialize_computation(chain.after_merge),
        num_clients=3,
        clients_per_leaf=2,
        draw=DrawKey(0, 0),
    )
    partials = tuple(stored.Stored((np.int32(n),)) for n in (4, 5))
    before = (stored.StoredClients(None, 0, 3),)

    found = work(handle, finish, (partials, before))

    assert decoded(found) == [np.int32(9)]
    assert handle.calls == ["evaluate"]


def test_turn_that_ends_ends_its_run(
    handle: FakeHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor: Any = handle._actor
    begin: Any = actor.begin

    def begin_and_end(scope: str) -> None:
        begin(scope)
        actor.end_before("scope", 2)

    monkeypatch.setattr(actor, "begin", begin_and_end)

    with pytest.raises(Exception, match="found it freed"):
        work(handle, subround_of(doubled), DATA)


@pytest.mark.parametrize("comp", [doubled, without_kernel], ids=["kernel", "none"])
def test_turn_that_has_ended_begins_no_run(handle: FakeHandle, comp: Any) -> None:
    actor: Any = handle._actor
    actor.end_before("scope", 2)
    actor.end_before("scope", 1)

    with pytest.raises(Exception, match="found it freed"):
        work(handle, subround_of(comp), DATA)


SEVEN = stored.StoredClients(tuple(np.int32(10**n) for n in range(9)), 1, 8)
DIGITS = plain_values.to_plain([[1, 2], [30], [], [400], [5], [60, 6], [7]], SEQUENCES)


def in_chunks(comp: Any, *chunks: range) -> plans.Subround:
    """Return a subround of seven clients, two a leaf, in chunks of leaves."""
    last = chunks[-1].stop
    leaves = tuple(range(2 * leaf, min(7, 2 * leaf + 2)) for leaf in range(last))
    return dataclasses.replace(
        subround_of(comp),
        leaves=leaves,
        subtrees=tuple((leaf, leaf + 1) for leaf in range(last)),
        chunks=chunks,
        num_workers=len(chunks),
    )


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param((range(2), range(2, 4)), id="a chunk each"),
        pytest.param((range(1), range(1, 3), range(3, 4)), id="two for one"),
    ],
)
@pytest.mark.parametrize(
    ("comp", "arg"),
    [
        pytest.param(doubled, SEVEN, id="kernel"),
        pytest.param(without_kernel, DIGITS, id="none"),
    ],
)
def test_chunks_of_several_workers_are_joined_in_order(
    handles: list[FakeHandle], comp: Any, arg: Any, chunks: tuple[range, ...]
) -> None:
    plan = in_chunks(comp, *chunks)

    found = share(handles[:2], plan, arg)

    alone = share(handles[:1], plan, arg)
    assert decoded(found) == decoded(alone)
    assert len(decoded(found)) == 4
    assert (found[0].kernel_leaves, found[0].no_kernel) == (
        alone[0].kernel_leaves,
        alone[0].no_kernel,
    )
    for handle in handles[:2]:
        assert set(handle.calls) == {"evaluate"}


def test_computation_that_is_not_cut_has_clients_on_all_workers(
    handles: list[FakeHandle],
) -> None:
    comp = in_chunks(without_kernel, range(1))
    whole = dataclasses.replace(
        comp,
        computation=blocks.serialize_computation(without_kernel),
        merge=None,
        leaves=(range(7),),
        subtrees=(),
        kernel=None,
        chunks=(),
        num_workers=2,
    )

    found = share(handles[:2], whole, DIGITS)

    assert decoded(found) == [np.int32(511)]
    for handle in handles[:2]:
        handle.close()  # after its last call
        assert "map" in handle.calls
        assert handle.calls[-1] == "end"


@pytest.mark.parametrize("comp", [doubled, without_kernel], ids=["kernel", "none"])
def test_work_travels_as_arguments_of_a_task(comp: Any) -> None:
    plan = dataclasses.replace(subround_of(comp), computation=b"interpreted")
    sent = Work.of("a subround", TERMS, plan, DATA)

    found = Work.from_arguments(*sent.as_arguments())

    assert found == sent
    assert found.unpack() == (plan, DATA)
