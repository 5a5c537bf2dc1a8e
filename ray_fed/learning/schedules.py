"""Schedules: which clients' updates enter which round, by the clock of devices.

    Synchronous    a round asks clients, and ends with the last update that it takes
    Buffered       clients work all the time; each `buffer` updates are a step

    version v of the state --start--> task (client, v, begins, ends) --> step u >= v

The version of a state is the number of rounds before it. The simulated clock follows
from devices, sampler, schedule and seeds. Nothing measured or trained changes it. So a
run has the same bits on any number of workers, and the clock can be ahead of the work.

Sources:
    Keith Bonawitz et al.: Towards Federated Learning at Scale: System Design. MLSys
    2019, https://arxiv.org/abs/1902.01046, Section 9 (130% of the wanted devices are
    asked, and late ones are left out).

    Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia
    Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020,
    https://arxiv.org/abs/1812.06127, Section 5.2 (partial work).

    John Nguyen, Kshitiz Malik, Hongyuan Zhan, Ashkan Yousefpour, Michael Rabbat, Mani
    Malek, Dzmitry Huba: Federated Learning with Buffered Asynchronous Aggregation.
    AISTATS 2022, https://arxiv.org/abs/2106.06639, Algorithm 1.

    Cong Xie, Sanmi Koyejo, Indranil Gupta: Asynchronous Federated Optimization. 2019,
    https://arxiv.org/abs/1903.03934, Algorithm 1.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.checks import (
    check_number,
    check_positive,
    expect_one_of,
    read_whole_or_none,
)
from ray_fed.learning.devices import HOUR_S, Devices, Fleet
from ray_fed.learning.processes import LearningProcess, Paces, check_chosen

Draw = Callable[[int, int | None], list[int]]
"""Function from the number of a cohort, and its wanted size, to its clients."""


class Task(NamedTuple):
    """The work of one client from its start to its update, on the simulated clock.

    Attributes:
        number: Number of tasks that began before.
        client: Index of the client.
        version: Version of the server's state that the client works from.
        begins: Simulated seconds at which the work begins.
        ends: Simulated seconds at which the update arrives or the client leaves.
        is_lost: Whether the client leaves and sends nothing.
    """

    number: int
    client: int
    version: int
    begins: float
    ends: float
    is_lost: bool


@dataclasses.dataclass(frozen=True)
class Step:
    """The decisions of the clock for a round.

    Attributes:
        clients: Clients whose updates enter, in the order of the call's arguments.
        told: Order of each of these clients, see `processes.Paces`, or None.
        versions: Version of the state from which each of these clients works.
        time: Simulated seconds of the run after the round.
        wasted: Simulated seconds of work that ended without entering any round.
        num_asked: Number of clients that began work.
        saved: State of the clock after the round, as JSON.
        starts: Whether clients work from the states of `versions`. Otherwise all work
            from the newest state.
        live: Versions of the states from which running tasks work.
    """

    clients: Sequence[int]
    told: list[dict[str, Any]] | None
    versions: tuple[int, ...]
    time: float
    wasted: float
    num_asked: int
    saved: bytes
    starts: bool = False
    live: frozenset[int] = frozenset()

    def report(self) -> dict[str, Any]:
        """Return the fields of the round's record that the clock decides."""
        return {
            "clients": tuple(self.clients),
            "simulated_time": self.time,
            "wasted_seconds": self.wasted,
            "versions": self.versions,
            "live_versions": 1 + len(self.live),
        }


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class Synchronous:
    """Rounds whose clients begin at the same time, on the clock of `devices`.

    A round ends with the last update that it takes. A client that cannot begin in the
    hour of a round does not take part in it. If no client can, the round begins at the
    next full hour in which one can.

    Attributes:
        over_selection: Factor on the cohort size n, >= 1. A round asks
            `ceil(over_selection * n)` clients and takes the first n updates.
        deadline: Largest number of simulated seconds of a round, > 0. None: no limit.
        late: Treatment of a client that cannot do all its epochs by the deadline. With
            "leave_out", its work is lost. With "partial", it does as many epochs as it
            can, and its work is lost only if it cannot do one.
        empty: Treatment of a round in which clients were asked and no update comes.
            With "error", the run ends with an error. With "skip", the round has no
            clients.

    Raises:
        ConfigError: A field is out of its range.
    """

    over_selection: float = 1.0
    deadline: float | None = None
    late: Literal["leave_out", "partial"] = "leave_out"
    empty: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        check_number(
            "over_selection", self.over_selection, lambda s: s >= 1, "of at least 1"
        )
        if self.deadline is not None:
            check_positive("deadline", self.deadline)
        expect_one_of("late", self.late, ("leave_out", "partial"))
        expect_one_of("empty", self.empty, ("error", "skip"))
        if self.late == "partial" and self.deadline is None:
            raise errors.ConfigError(
                'Expected a `deadline` for late="partial", found none: pass the'
                " simulated seconds after which clients stop."
            )

    def pace(self, process: LearningProcess, devices: Devices) -> LearningProcess:
        """Return `process`, or a process that gives clients this schedule's orders.

        Raises:
            ConfigError: Clients of the process cannot do partial work, or its privacy
                assumes cohorts that are drawn by chance alone.
        """
        if self.late == "partial":
            return _pace(process, Paces(limits_epochs=True))
        chooses = self.over_selection > 1 or self.deadline is not None
        if chooses or devices.hours is not None or devices.drop_out:
            check_chosen(process)
        return process


class SynchronousClock:
    """The clock of `Synchronous`.

    Raises ConfigError if there are fewer clients than a round asks.
    """

    def __init__(
        self,
        schedule: Synchronous,
        fleet: Fleet,
        draw: Draw,
        num_clients: int,
        cohort_size: int | None,
    ) -> None:
        self._schedule, self._fleet, self._draw = schedule, fleet, draw
        self._wanted, self._asked = None, cohort_size
        self._time = 0.0
        if schedule.over_selection == 1:
            return
        if cohort_size is None:
            raise errors.ConfigError(
                "Expected a `cohort_size` for `over_selection`, found none: it is the"
                " number of updates that a round takes."
            )
        self._wanted = cohort_size
        # Rounded first: 1.1 * 10 is a little more than 11.
        self._asked = math.ceil(round(schedule.over_selection * cohort_size, 6))
        if self._asked > num_clients:
            raise errors.ConfigError(
                f"Expected at least {self._asked} clients in `data`, found"
                f" {num_clients}: a cohort of {cohort_size} with an over-selection of"
                f" {schedule.over_selection:g} asks {self._asked} clients."
            )

    def begin(self, index: int, saved: bytes | None) -> None:
        """Begin at time 0, or at the end of the round that saved `Step.saved`."""
        del index
        self._time = 0.0 if saved is None else json.loads(saved)["time"]

    def advance(self, index: int) -> Step:
        """Return the clock's decisions for the next round, which has this index.

        Raises ConfigError if no update arrives in time and `empty` is "error".
        """
        schedule, fleet = self._schedule, self._fleet
        drawn = self._draw(index, self._asked)
        asked = self._wait_for_one(drawn)
        limit = math.inf if schedule.deadline is None else schedule.deadline
        spent: dict[int, float] = {}
        updates: list[tuple[float, int, int]] = []
        for client in asked:
            epochs = fleet.epochs
            if schedule.late == "partial":
                epochs = fleet.epochs_within(client, limit)
            seconds = fleet.seconds(client, max(1, epochs))
            share = fleet.find_drop(client, index)
            # A client that leaves has also spent time, and the round may wait for it.
            spent[client] = min(limit, seconds if share is None else seconds * share)
            if share is None and seconds <= limit:
                updates.append((seconds, client, epochs))
        taken = sorted(updates)[: self._wanted]
        if drawn and not taken and schedule.empty == "error":
            within = "" if limit == math.inf else f" within {limit:g} simulated seconds"
            raise errors.ConfigError(
                f"Expected an update of one of {len(drawn)} clients in round"
                f" {index + 1}, found none{within} of {len(asked)} that began work:"
                " look at the `hours` and the `drop_out` of devices, allow more time,"
                ' ask more clients, or pass empty="skip".'
            )
        duration = max(spent.values(), default=0.0)
        # With enough updates, the round does not wait for the others.
        if taken and len(taken) == self._wanted:
            duration = taken[-1][0]
        epochs_of = {client: epochs for _, client, epochs in taken}
        clients = [client for client in asked if client in epochs_of]
        lost = [min(s, duration) for c, s in spent.items() if c not in epochs_of]
        self._time += duration
        return Step(
            clients=clients,
            told=[{"epochs": epochs_of[client]} for client in clients]
            if schedule.late == "partial"
            else None,
            versions=(index,) * len(clients),
            time=self._time,
            wasted=math.fsum(lost),
            num_asked=len(asked),
            saved=json.dumps({"time": self._time}).encode(),
        )

    def _wait_for_one(self, cohort: Sequence[int]) -> list[int]:
        """Return the clients that can begin, after hours in which none of them can."""
        for _ in range(self._fleet.period + 1):
            there = self._fleet.who_is_there(self._time)
            able = [client for client in cohort if there is None or there[client]]
            if able or not cohort:
                return able
            self._time = _next_hour(self._time)
        return []


Staleness = Literal["constant", "polynomial"] | Callable[[int], float]


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class Buffered:
    """Asynchronous steps: each takes the next `buffer` updates, however old they are.

    `concurrency` clients work at the same time. When a client ends, another client
    begins from the newest state. The sampler draws cohorts of `concurrency` clients,
    which begin in an order that is shuffled by the seed of the run. Clients that still
    work, or that are not there in this hour, are passed over.

    A step multiplies the update of a client by the weight of its staleness: the number
    of steps since the state from which the client worked. The aggregator then takes the
    updates. With the default aggregator and `buffer` updates of weights n_k, the server
    steps by sum_k n_k s(staleness_k) delta_k / sum_k n_k.

    With a buffer of 1 and averages="weights", this is FedAsync: the new weights are (1
    - alpha s) w + alpha s w_k, with alpha as the rate of SGD at the server.

    Attributes:
        concurrency: Number of clients that work at the same time, from 1 to all.
        buffer: Number of updates of a step, from 1 to `concurrency`.
        staleness: Weight of an update by its staleness: "constant" is 1, "polynomial"
            is (1 + staleness) ** -exponent, and a function of an int returns a number
            > 0 and <= 1.
        exponent: Exponent of "polynomial", >= 0.
        averages: "changes" or "weights". With "changes", an update is the change from
            the client's start, as in FedBuff. With "weights", it leads from the newest
            weights to the client's weights, as in FedAsync.
        max_staleness: Largest staleness of an update, >= 0. Work that would become
            older is given up. So at most `max_staleness` + 1 states live at the same
            time. None: no limit, and at most `concurrency` + 1 states live.

    Raises:
        ConfigError: A field is out of its range, or the buffer is larger than the
            concurrency.
    """

    concurrency: int
    buffer: int
    staleness: Staleness = "polynomial"
    exponent: float = 0.5
    averages: Literal["changes", "weights"] = "changes"
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        read_whole("concurrency", self.concurrency, 1)
        read_whole("buffer", self.buffer, 1)
        if self.buffer > self.concurrency:
            raise errors.ConfigError(
                f"Expected a `buffer` of at most `concurrency`, {self.concurrency},"
                f" found {self.buffer}: a step would wait for clients that never begin."
            )
        if not callable(self.staleness):
            expect_one_of("staleness", self.staleness, ("constant", "polynomial"))
        check_number("exponent", self.exponent, lambda a: a >= 0, "of at least 0")
        expect_one_of("averages", self.averages, ("changes", "weights"))
        read_whole_or_none("max_staleness", self.max_staleness, 0)

    def weigh(self, staleness: int) -> float:
        """Return the weight of an update by its staleness, > 0 and <= 1.

        Raises:
            ConfigError: The function `staleness` returns another number.
        """
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "polynomial":
            return (1.0 + staleness) ** -self.exponent
        weight = self.staleness(staleness)
        check_number(
            f"staleness({staleness})",
            weight,
            lambda w: 0 < w <= 1,
            "to be above 0 and at most 1",
        )
        return float(weight)

    def pace(self, process: LearningProcess, devices: Devices) -> LearningProcess:
        """Return a process that gives clients this schedule's orders.

        Raises:
            ConfigError: Clients of the process keep values or send more than a change
                of weights, or the process adds noise.
        """
        del devices
        paces = Paces(self.buffer, moves_to=self.averages == "weights")
        return _pace(process, paces)


_MOST_DRAWS = 100
"""Number of cohorts in a row that are searched for a client that can begin."""


class BufferedClock:
    """The clock of `Buffered`. It knows the running tasks, and which tasks end next.

    `seed` decides the order in which the clients of a cohort begin. Raises ConfigError
    if there are fewer clients than work at the same time.
    """

    def __init__(
        self,
        schedule: Buffered,
        fleet: Fleet,
        draw: Draw,
        num_clients: int,
        seed: int,
    ) -> None:
        self._schedule, self._fleet, self._draw = schedule, fleet, draw
        self._num_clients, self._seed = num_clients, seed
        if schedule.concurrency > num_clients:
            raise errors.ConfigError(
                f"Expected a `concurrency` of at most {num_clients}, the number of"
                f" clients, found {schedule.concurrency}."
            )
        schedule.weigh(0)
        self.begin(0, None)

    def begin(self, index: int, saved: bytes | None) -> None:
        """Begin the step `index` at time 0, or with the saved tasks of `Step.saved`."""
        found: dict[str, Any] = {} if saved is None else json.loads(saved)
        self._index = index
        self._time: float = found.get("time", 0.0)
        self._number: int = found.get("number", 0)
        self._under_way = [Task(*task) for task in found.get("under_way", ())]
        self._busy = {task.client for task in self._under_way}
        # The numbers of drawn cohorts, and of used clients of the last cohort.
        self._drawn, self._seen = found.get("queue", (0, 0))
        self._queue = self._shuffle(self._drawn - 1) if self._drawn else []
        self.check()

    def advance(self, index: int) -> Step:
        """Return the clock's decisions for the next step, which has this index.

        Raises ConfigError if no client can begin and no task runs.
        """
        schedule, first = self._schedule, self._number
        self._index = index
        wasted, taken, idle_hours = list[float](), list[Task](), 0
        while len(taken) < schedule.buffer:
            is_open = not self._fill() and self._fleet.is_there is not None
            hour = _next_hour(self._time) if is_open else math.inf
            ended = min(self._under_way, key=_order, default=None)
            if ended is None and (not is_open or idle_hours > self._fleet.period):
                raise errors.ConfigError(
                    f"Expected a client that can begin work in step {index + 1}, found"
                    f" none in {_MOST_DRAWS} cohorts of the sampler: check the weights"
                    " of the sampler, and the `hours` of devices."
                )
            if ended is None or hour < ended.ends:
                self._time = hour
                idle_hours = idle_hours + 1 if ended is None else 0
                continue
            self._time = ended.ends
            self._remove(ended)
            if ended.is_lost:
                wasted.append(ended.ends - ended.begins)
            else:
                taken.append(ended)
        return self._end(taken, wasted + self._give_up(), self._number - first)

    def check(self) -> None:
        """Raise SavedStateError unless the running tasks can belong to this clock.

        There are at most `concurrency` tasks, each of another client. No task began
        after the clock's time or from a state that does not exist yet, and no task has
        ended.
        """
        tasks = self._under_way
        is_right = (
            len(tasks) <= self._schedule.concurrency
            and len({task.client for task in tasks}) == len(tasks)
            and all(task.version <= self._index for task in tasks)
            and all(task.begins <= self._time <= task.ends for task in tasks)
            and all(0 <= task.number < self._number for task in tasks)
        )
        if not is_right:
            raise errors.SavedStateError(
                f"Expected at most {self._schedule.concurrency} tasks of different"
                f" clients under way at {self._time:g} simulated seconds, found"
                f" {errors.describe(tasks)}: pass another `storage_path`."
            )

    def _give_up(self) -> list[float]:
        """End tasks that would be too old in the next step; return their seconds."""
        most = self._schedule.max_staleness
        old = [
            task
            for task in self._under_way
            if most is not None and self._index + 1 - task.version > most
        ]
        for task in old:
            self._remove(task)
        return [self._time - task.begins for task in old]

    def _remove(self, task: Task) -> None:
        self._under_way.remove(task)
        self._busy.remove(task.client)

    def _fill(self) -> bool:
        """Begin tasks up to the concurrency, and return whether it was reached."""
        while len(self._under_way) < self._schedule.concurrency:
            client = self._pick()
            if client is None:
                return False
            seconds = self._fleet.seconds(client)
            share = self._fleet.find_drop(client, self._number)
            ends = self._time + (seconds if share is None else seconds * share)
            task = Task(
                self._number, client, self._index, self._time, ends, share is not None
            )
            self._number += 1
            self._under_way.append(task)
            self._busy.add(client)
        return True

    def _pick(self) -> int | None:
        """Return the client that begins next, or None if no client can begin."""
        there = self._fleet.who_is_there(self._time)
        num_there = self._num_clients if there is None else int(there.sum())
        num_busy = sum(there is None or bool(there[client]) for client in self._busy)
        if num_busy == num_there:
            return None
        for _ in range(_MOST_DRAWS):
            while self._seen < len(self._queue):
                client = self._queue[self._seen]
                self._seen += 1
                if client not in self._busy and (there is None or there[client]):
                    return client
            self._queue = self._shuffle(self._drawn)
            self._drawn, self._seen = self._drawn + 1, 0
        return None

    def _shuffle(self, number: int) -> list[int]:
        """Draw a cohort, and return it in the order in which its clients begin."""
        cohort = self._draw(number, self._schedule.concurrency)
        # The 1 keeps the order apart from the numbers by which samplers draw cohorts.
        generator = np.random.default_rng([self._seed, number, 1])
        return [cohort[place] for place in generator.permutation(len(cohort))]

    def _end(self, taken: Sequence[Task], wasted: list[float], begun: int) -> Step:
        weigh = self._schedule.weigh
        saved = {
            "time": self._time,
            "number": self._number,
            "queue": (self._drawn, self._seen),
            "under_way": self._under_way,
        }
        return Step(
            clients=[task.client for task in taken],
            told=[
                {"start": place, "scale": weigh(self._index - task.version)}
                for place, task in enumerate(taken)
            ],
            versions=tuple(task.version for task in taken),
            time=self._time,
            wasted=math.fsum(wasted),
            num_asked=begun,
            saved=json.dumps(saved).encode(),
            starts=True,
            live=frozenset(task.version for task in self._under_way),
        )


def _order(task: Task) -> tuple[float, int]:
    return task.ends, task.number


def _next_hour(time_s: float) -> float:
    return (time_s // HOUR_S + 1) * HOUR_S


def _pace(process: LearningProcess, paces: Paces) -> LearningProcess:
    if process.pace is None:
        raise errors.ConfigError(
            "Expected a process of `build_process`, or of another function of"
            " `learning`, for late or partial work, found one that was made by hand."
        )
    return process.pace(paces)


class LiveStates:
    """Server states from which later rounds still work, by version.

    A state is stored until no running task works from it.
    """

    def __init__(self) -> None:
        self.held: Mapping[int, Any] = {}

    def tell(self, index: int, state: Any, step: Step) -> list[Any]:
        """Return the arguments of `next` that give clients the orders of a step.

        They are empty for a process that is not paced, see `processes.Paces`. `state`
        is the state before the round. It is stored if running tasks work from it.
        """
        if step.told is None:
            return []
        if not step.starts:
            return [step.told]
        held = {**self.held, index: state}
        starts = [held[version] for version in step.versions]
        self.held = {v: each for v, each in held.items() if v in step.live}
        return [tuple(starts), step.told]


def open_clock(
    schedule: Synchronous | Buffered,
    fleet: Fleet,
    draw: Draw,
    num_clients: int,
    cohort_size: int | None,
    seed: int,
) -> SynchronousClock | BufferedClock:
    """Return the clock of a run. Raises ConfigError if it does not fit the clients."""
    if isinstance(schedule, Synchronous):
        return SynchronousClock(schedule, fleet, draw, num_clients, cohort_size)
    if cohort_size is not None:
        raise errors.ConfigError(
            f"Expected no `cohort_size` for `Buffered`, found {cohort_size}: pass"
            " `concurrency` and `buffer`."
        )
    return BufferedClock(schedule, fleet, draw, num_clients, seed)
