"""What holds of a pool whatever happens in which order."""

import collections

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st
from typing_extensions import override

from ray_fed.cluster.pool.actions import (
    FailureClass,
    Grant,
    Refuse,
    Request,
    Size,
    Start,
    Stop,
)
from ray_fed.cluster.pool.decisions import Pool
from ray_fed.cluster.pool.placement import Node
from ray_fed.cluster.pool.starts import MAX_FAILED_STARTS

LEAST, MOST = 2, 4
BUDGETS: dict[str, int] = {"crash": 3, "preemption": 3, "memory": 1, "hang": 1}
NODES = "abc"
SLOTS = 2


class PoolMachine(stateful.RuleBasedStateMachine):
    """A pool on nodes that come and go, under workers that do."""

    def __init__(self) -> None:
        super().__init__()
        size = Size(LEAST, MOST, is_fixed=False, each="1 CPU", wait_timeout_s=50.0)
        self.pool = Pool(size, BUDGETS, start_timeout_s=20.0)
        self.now_s = 0.0
        self.nodes: dict[str, bool] = {}  # to whether it drains
        self.starting: dict[str, str] = {}  # to its node
        self.idle: dict[str, str] = {}
        self.leased: dict[str, tuple[str, str]] = {}  # to node and subround
        self.waiting: dict[int, str] = {}
        self.ended: set[str] = set()
        self.requested = 0
        self.subrounds = 0

    def _held(self) -> collections.Counter[str]:
        holding = [*self.idle.values(), *(node for node, _ in self.leased.values())]
        return collections.Counter(holding)

    def _survey(self) -> None:
        held = self._held()
        self.pool.survey(
            [
                Node(name, name, max(0, SLOTS - held[name]), SLOTS, is_draining)
                for name, is_draining in self.nodes.items()
            ]
        )

    @stateful.rule()
    def decide(self) -> None:
        """Do what the pool says, and hold it to what it may say."""
        for action in self.pool.decide(self.now_s):
            match action:
                case Start(worker, node):
                    assert worker not in self.ended
                    assert node in self.nodes
                    assert not self.nodes[node]
                    self.starting[worker] = node
                case Stop(worker, _):
                    assert worker not in self.leased
                    self._end(worker)
                case Grant(ticket, worker, _):
                    node = self.idle.pop(worker)
                    self.leased[worker] = (node, self.waiting.pop(ticket))
                case Refuse(ticket):
                    self.waiting.pop(ticket)
                case Request(count):
                    assert count in {0, MOST}
                    assert count != self.requested
                    self.requested = count
                case _:
                    self._survey()

    def _end(self, worker: str) -> None:
        for workers in (self.starting, self.idle, self.leased):
            workers.pop(worker, None)
        self.ended.add(worker)

    @stateful.rule(nodes=st.dictionaries(st.sampled_from(NODES), st.booleans()))
    def change_nodes(self, nodes: dict[str, bool]) -> None:
        self.nodes = nodes
        self._survey()

    @stateful.rule(seconds=st.sampled_from([0.1, 1.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @stateful.rule()
    def ask(self) -> None:
        self.subrounds += 1
        subround = f"subround {self.subrounds}"
        self.waiting[self.pool.ask(subround)] = subround

    @stateful.precondition(lambda self: self.starting)
    @stateful.rule(data=st.data())
    def get_ready(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.starting)))
        self.idle[worker] = self.starting.pop(worker)
        self.pool.ready(worker, self.idle[worker])

    @stateful.precondition(lambda self: self.leased)
    @stateful.rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.leased)))
        self.idle[worker], _ = self.leased.pop(worker)
        self.pool.give_back(worker)

    @stateful.precondition(lambda self: self.starting or self.idle or self.leased)
    @stateful.rule(data=st.data(), failure_class=st.sampled_from(sorted(BUDGETS)))
    def lose(self, data: st.DataObject, failure_class: FailureClass) -> None:
        alive = sorted([*self.starting, *self.idle, *self.leased])
        worker = data.draw(st.sampled_from(alive))
        _, subround = self.leased.get(worker, ("", ""))
        self._end(worker)
        self.pool.lost(worker, failure_class, "it died")
        if subround:
            self.waiting[self.pool.ask(subround)] = subround

    @stateful.invariant()
    def size_is_within_its_bounds(self) -> None:
        staying = [*self.starting.values(), *self.idle.values()]
        staying += [node for node, _ in self.leased.values()]
        staying = [node for node in staying if not self.nodes.get(node, True)]
        assert len(staying) <= MOST

    @override
    def teardown(self) -> None:
        """No ticket waits for ever: with a good node, or without any."""
        self.nodes = dict.fromkeys("xy", False) if self.subrounds % 2 else {}
        self._survey()
        for _ in range(200 + 4 * MAX_FAILED_STARTS):
            self.decide()
            for worker in list(self.starting):
                self.idle[worker] = self.starting.pop(worker)
                self.pool.ready(worker, self.idle[worker])
            for worker in list(self.leased):
                self.idle[worker], _ = self.leased.pop(worker)
                self.pool.give_back(worker)
            due_s = self.pool.next_deadline_s()
            self.now_s = max(self.now_s, due_s or 0.0)
        assert not self.waiting


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = hypothesis.settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
