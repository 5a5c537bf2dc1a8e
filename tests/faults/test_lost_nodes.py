"""A node is taken away without notice; its worker finds no other place."""

from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]


def test_node_that_is_removed_costs_its_subround_only(
    cluster: Any, contexts: Any, client_work: Any, meanwhile: Any, runs: Any
) -> None:
    work = client_work(waiting=(3, 11))
    expected = work.expected(3)
    context = contexts(workers=2, subrounds=2, stragglers={"enabled": False})

    meanwhile(work.let_go_once_all_run)
    bits = [work.run(context)]
    work.reset()

    pids = {s.worker_pid for s in context.last_report.subrounds}

    def remove_a_node() -> None:
        work.wait_for(3, 11)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        work.wait_until(lambda: not all(runs(pid) for pid in pids))
        work.let_go()

    meanwhile(remove_a_node)
    bits.append(work.run(context))

    assert bits == expected[:2]
    report = context.last_report
    ((index, (attempt,)),) = [
        (s.subround_index, s.lost) for s in report.subrounds if s.lost
    ]
    assert attempt.ended in {"crash", "preemption"}
    once, twice = [1] * 8, [2] * 4 + [1] * 4
    assert work.runs() == (twice + once if index == 0 else once + twice)

    # The lost worker has no place any more; the other one carries on alone.
    bits.append(work.run(context))

    assert bits == expected
    assert len({s.worker_pid for s in context.last_report.subrounds}) == 1
    assert context.last_report.retries == {}
