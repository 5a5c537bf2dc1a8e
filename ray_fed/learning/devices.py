"""The clients' devices, whose speed decides when updates arrive on a simulated clock.

    seconds of a task = bytes down / download
                        + epochs * examples * seconds_per_example
                        + bytes up / upload

The bytes come from `LearningProcess.client_bytes`. Nothing is measured, so a simulated
time is the same on each machine.

Sources:
    Keith Bonawitz et al.: Towards Federated Learning at Scale: System Design. MLSys
    2019, https://arxiv.org/abs/1902.01046 (devices that drop out).

    Chengxu Yang et al.: Characterizing Impacts of Heterogeneity in Federated Learning
    upon Large-Scale Smartphone Data. WWW 2021, https://arxiv.org/abs/2006.08848 (hours
    of smartphones).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.data import ClientData
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.batches import count_rows
from ray_fed.learning.checks import check_number, check_positive
from ray_fed.learning.processes import LearningProcess

__all__ = ["Devices", "LogNormal"]

HOUR_S = 3600.0


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class LogNormal:
    """Numbers of clients, median * exp(sigma * z) with z from N(0, 1) for each client.

    Columns with the same seed have the same z. Pass different seeds if, for example,
    the speed of a device does not depend on its connection.

    Attributes:
        median: Median of the numbers, > 0.
        sigma: Standard deviation of their logarithms, >= 0.
        seed: Seed of the numbers, >= 0.

    Raises:
        ConfigError: A field is out of its range.
    """

    median: float
    sigma: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive("median", self.median)
        check_number("sigma", self.sigma, lambda s: s >= 0, "of at least 0")
        read_whole("seed", self.seed, 0)

    def draw(self, num_clients: int) -> NDArray[np.float64]:
        """Return one number for each client, f64[num_clients]."""
        normal = np.random.default_rng(self.seed).standard_normal(num_clients)
        with np.errstate(over="ignore"):  # infinite numbers are refused later
            return self.median * np.exp(self.sigma * normal)


Column: TypeAlias = float | LogNormal | Sequence[float] | Mapping[Any, float]
"""Numbers of clients: one number for all clients, a distribution, a sequence in client
order, or a mapping by client id, such as a pandas column whose index has the ids."""


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class Devices:
    """The simulated devices of all clients of a run.

    A `Column` is one number for all clients, a distribution, a sequence in client
    order, or a mapping by client id, such as a pandas column whose index has the ids.

    Attributes:
        seconds_per_example: Simulated seconds of one example in one epoch, > 0.
        download: Bytes per second that a client receives, > 0. None: this takes no
            time.
        upload: Bytes per second that a client sends, > 0. None: this takes no time.
        hours: For each client, in order or by id, the hours in which it can begin work.
            The simulated time begins with hour 0. None: all hours.
        period: Number of hours after which `hours` repeats, >= 1. 24: a day, 168: a
            week.
        drop_out: Probability that a client leaves during its work, >= 0 and < 1. It
            leaves after a share of the work that is uniform in [0, 1).
        examples: Number of examples of each client in one epoch, >= 0. None: the number
            of rows of its data. This is known for lists of batches and `ClientData` of
            tables.
        seed: Seed of `drop_out`, >= 0.

    Raises:
        ConfigError: A field is out of its range.
    """

    seconds_per_example: Column
    download: Column | None = None
    upload: Column | None = None
    hours: Sequence[Sequence[int]] | Mapping[Any, Sequence[int]] | None = None
    period: int = 24
    drop_out: float = 0.0
    examples: Column | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value: Any = getattr(self, field.name)
            if hasattr(value, "to_dict"):  # a column of pandas, with ids as its index
                column = value.to_dict()
                if len(column) < len(value):
                    raise errors.ConfigError(
                        f"Expected each client once in the index of `{field.name}` of"
                        f" devices, found {len(value)} rows of {len(column)} clients:"
                        " make one of them, such as by `groupby(level=0).mean()`."
                    )
                object.__setattr__(self, field.name, column)
        read_whole("period", self.period, 1)
        read_whole("seed", self.seed, 0)
        check_number(
            "drop_out", self.drop_out, lambda p: 0 <= p < 1, "from 0 to below 1"
        )
        for name in ("seconds_per_example", "download", "upload"):
            if isinstance(getattr(self, name), int | float | bool):
                check_positive(name, getattr(self, name))

    def fleet(self, process: LearningProcess, data: Sequence[Any]) -> "Fleet":
        """Compute how long each client of a run works.

        Args:
            process: Process that the clients work on.
            data: Data of the clients, with the attribute `ids` if they have ids.

        Raises:
            ConfigError: A column lacks a client or has a number out of its range, or
                examples or bytes are not known.
        """
        moved = process.client_bytes
        if moved is None and (self.download is not None or self.upload is not None):
            raise errors.ConfigError(
                "Expected a process with `client_bytes`, the bytes that clients move,"
                " for `download` and `upload`, found one without: leave these out, or"
                " build it by `build_process` with fixed shapes."
            )
        down, up = (0, 0) if moved is None else moved
        examples = _count_examples(data) if self.examples is None else self.examples
        work = _read_column("seconds_per_example", self.seconds_per_example, data)
        return Fleet(
            download_s=self._seconds("download", down, data),
            epoch_s=work * _read_column("examples", examples, data, least=0),
            upload_s=self._seconds("upload", up, data),
            epochs=process.epochs,
            is_there=self._read_hours(data),
            drop_out=self.drop_out,
            seed=self.seed,
        )

    def _seconds(
        self, name: str, num_bytes: int, data: Sequence[Any]
    ) -> NDArray[np.float64]:
        rate: Any = getattr(self, name)
        if rate is None:
            return np.zeros(len(data))
        return num_bytes / _read_column(name, rate, data)

    def _read_hours(self, data: Sequence[Any]) -> NDArray[np.bool_] | None:
        """Return which clients can begin work in which hour, bool[period, clients]."""
        if self.hours is None:
            return None
        there = np.zeros((self.period, len(data)), bool)
        for client, hours in enumerate(_by_client("hours", self.hours, data)):
            if not isinstance(hours, Iterable):
                raise errors.ConfigError(
                    "Expected a list of hours for each client as `hours` of devices,"
                    f" such as `[[0, 1], [1]]`, found {errors.describe(hours)}."
                )
            for hour in hours:
                there[read_whole("hours", hour, 0, self.period - 1), client] = True
        return there


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The simulated seconds of work for each client of a run.

    Attributes:
        download_s: Seconds to receive the server's values, f64[clients].
        epoch_s: Seconds of one pass over a client's data, f64[clients].
        upload_s: Seconds to send the result, f64[clients].
        epochs: Number of passes in a full task.
        is_there: Whether a client can begin work in an hour, bool[period, clients].
            None: all clients can begin in all hours.
        drop_out: Probability that a client leaves during its work.
        seed: Seed of `drop_out`.
    """

    download_s: NDArray[np.float64]
    epoch_s: NDArray[np.float64]
    upload_s: NDArray[np.float64]
    epochs: int
    is_there: NDArray[np.bool_] | None
    drop_out: float
    seed: int

    @property
    def period(self) -> int:
        """Number of hours after which `is_there` repeats, or 0 without `is_there`."""
        return 0 if self.is_there is None else len(self.is_there)

    def seconds(self, client: int, epochs: int | None = None) -> float:
        """Return the simulated seconds of a client's task, by default of all epochs."""
        passes = self.epochs if epochs is None else epochs
        moved = self.download_s[client] + self.upload_s[client]
        return float(moved + passes * self.epoch_s[client])

    def epochs_within(self, client: int, limit_s: float) -> int:
        """Return how many epochs, 0 or more, a client can do and send in `limit_s`."""
        passes = self.epochs
        while passes and self.seconds(client, passes) > limit_s:
            passes -= 1
        return passes

    def find_drop(self, client: int, number: int) -> float | None:
        """Return the share of its task after which a client leaves, or None.

        Tasks of one client with different `number` draw independently.
        """
        if not self.drop_out:
            return None
        # Numpy pads seeds with zeros, so the last 1 keeps client 0 apart from samplers.
        draws = np.random.default_rng([self.seed, number, client, 1]).random(2)
        return float(draws[1]) if draws[0] < self.drop_out else None

    def who_is_there(self, time_s: float) -> NDArray[np.bool_] | None:
        """Return which clients can begin work at a time, bool[clients]. None: all."""
        if self.is_there is None:
            return None
        return self.is_there[int(time_s // HOUR_S) % self.period]


def _count_examples(data: Sequence[Any]) -> list[float]:
    """Return the number of examples of each client, or raise ConfigError."""
    if isinstance(data, ClientData) and data.table is not None:
        if data.weights is not None:
            return data.weights.tolist()
    elif isinstance(data, list | tuple):
        counts = [_count_of_one(client) for client in cast("Sequence[Any]", data)]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts):
            return known
    raise errors.ConfigError(
        "Expected the numbers of examples of clients, which are known for lists of"
        " batches and for `ClientData` of tables, found"
        f" {errors.describe(data)}: pass them as `Devices(examples=)`."
    )


def _count_of_one(client: Any) -> float | None:
    counts = count_rows(client)
    is_known = isinstance(counts, list) and None not in cast("list[Any]", counts)
    return float(sum(cast("list[int]", counts))) if is_known else None


def _read_column(
    name: str, column: Any, data: Sequence[Any], least: float | None = None
) -> NDArray[np.float64]:
    """Return a column, f64[clients]. Its numbers are above 0, or at least `least`."""
    if isinstance(column, LogNormal):
        column = column.draw(len(data))
    if isinstance(column, int | float) and not isinstance(column, bool):
        column = [column] * len(data)
    given = _by_client(name, column, data)
    try:
        found = np.array([float(number) for number in given])
    except (TypeError, ValueError):
        found = np.array([np.nan])
    is_right = np.isfinite(found) & (found > 0 if least is None else found >= least)
    if not is_right.all():
        wanted = "above 0" if least is None else f"of at least {least:g}"
        shown = errors.describe([given[i] for i in np.flatnonzero(~is_right)[:5]])
        raise errors.ConfigError(
            f"Expected finite numbers {wanted} as `{name}` of devices, found {shown}."
        )
    return found


def _by_client(name: str, column: Any, data: Sequence[Any]) -> list[Any]:
    if isinstance(column, Mapping):
        named = cast("Mapping[Any, Any]", column)
        ids: Sequence[Any] = getattr(data, "ids", range(len(data)))
        missing = [each for each in ids if each not in named]
        if missing:
            raise errors.ConfigError(
                f"Expected `{name}` of devices for each client, found none for"
                f" {errors.describe(missing[:5])}: add them to the table."
            )
        return [named[each] for each in ids]
    listed = list(column) if hasattr(column, "__iter__") else None
    if listed is None or isinstance(column, str) or len(listed) != len(data):
        found = errors.describe(column)
        if listed is not None:
            found = f"{len(listed)} values"
        raise errors.ConfigError(
            f"Expected a value for each of {len(data)} clients as `{name}` of devices,"
            f" found {found}."
        )
    return listed
