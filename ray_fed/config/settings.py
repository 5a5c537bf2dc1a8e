"""The tree of settings, frozen, with their defaults."""

import os
from typing import Annotated, Any, Literal

import pydantic
import pydantic_core

import ray_fed.config.sources as sources
import ray_fed.errors as errors
from ray_fed.config.fields import (
    COUNTED,
    Amount,
    Amounts,
    Budget,
    Bytes,
    Count,
    CountOrNone,
    Environment,
    Real,
    Seconds,
    Seed,
    Size,
    expand_count,
    expand_counts,
    name_switch,
)
from ray_fed.config.frozen import Frozen
from ray_fed.values import read_limits


class Workers(Frozen):
    """What the pool of actors is made of.

    Attributes:
        count: how many actors; (min, max): as many as the cluster has room for, looked
            at every round; None: one for each CPU (or GPU, where `num_gpus` asks for
            some) that the cluster has, or the placement group of this process.
        num_cpus: of each actor, also its TensorFlow threads: max(1, int(num_cpus)).
        num_gpus: of each actor, at most 1, as its executor works on one device; a
            fraction becomes a TensorFlow memory limit.
        resources: further Ray resources of each actor.
        start_timeout_s: seconds within which an actor must be ready.
        client_bytes: of `program.ClientData`, and of rows in local files, that each
            actor keeps between rounds; also of one sequence that it reads from a
            dataset, a generator or another iterable. With 0 it keeps nothing, and reads
            as much as `data` says.
        wait_timeout_s: seconds that a round waits for room for as many actors as it
            needs (min, or one); for nodes, that is, which have yet to come.
        allow_mixed: whether actors may differ from the driver in versions, and from
            one another in what decides the bits of a result.
    """

    count: Size = None
    num_cpus: Annotated[Amount, pydantic.Field(gt=0)] = 1.0
    num_gpus: Amount = 0.0
    resources: Amounts = pydantic.Field(default={}, validate_default=True)
    start_timeout_s: Seconds = 120.0
    client_bytes: Bytes = 2**30
    wait_timeout_s: Seconds = 300.0
    allow_mixed: bool = False

    @pydantic.field_validator("num_gpus")
    @classmethod
    def _one_device(cls, value: float) -> float:
        if value > 1:
            raise pydantic_core.PydanticCustomError(
                "num_gpus",
                "Input should be at most 1: an actor's executor works on one device."
                " For more GPUs have more actors (`workers.count`)",
            )
        return value


class Retry(Frozen):
    """How many failures of a class one subround may have before its round fails.

    Attributes:
        crash: a process or node died, an object was lost.
        preemption: a node was taken away with notice.
        memory: a process was ended for want of memory, or TensorFlow found none.
        hang: a worker took longer than `subrounds.timeout_s`.
    """

    crash: Budget = 3
    preemption: Budget = 10
    memory: Budget = 2
    hang: Budget = 1


class Subrounds(Frozen):
    """How a round is cut.

    Attributes:
        count: subrounds a round; None: one a worker. The bits of a result do not
            depend on it.
        timeout_s: seconds that a worker may take for a subround, from its lease: one
            that takes longer is ended and replaced, and the subround runs again, within
            `retry.hang`. The wait for a worker does not count: it ends when those
            before end, and `workers.start_timeout_s` bounds that for one to start.
            None: no limit.
    """

    count: Count | None = None
    timeout_s: Seconds | None = None


class Stragglers(Frozen):
    """When a subround runs a second time, beside the first, on a worker that is idle.

    The first result counts; the bits are the same. Effects of client work outside of
    its result, such as files, happen twice.

    Attributes:
        enabled: whether to do so at all.
        factor: so many times the median of the subrounds of the same kind in its round,
            half of which at least are done; > 1.
        min_s: seconds that a subround has had its worker, at least.
    """

    enabled: bool = True
    factor: Annotated[Real, pydantic.Field(gt=1, le=10**9)] = 3.0
    min_s: Seconds = 10.0


class Kernels(Frozen):
    """How the work of clients becomes one graph that loops over them.

    Attributes:
        enabled: whether to try; what has no kernel is interpreted, call by call.
        call_s: seconds of clients that one call may cover, about. Cancelling waits for
            a call to end; the bits of a result do not depend on it.
        jit: whether XLA compiles the work on leaves whose clients all have data of one
            shape, once for each shape and worker. "auto": where a rule says that it
            gains, a function of computation, sizes and kind of device alone (see
            docs/performance.md); `RoundReport.jit_decisions` says what it came to. With
            XLA an index or a label out of range is no error.
        vectorised_clients: of such a leaf, how many clients work at once, in the memory
            of as many; for small models on a GPU.

    `jit` and `vectorised_clients` decide bits, and leave alone what draws, has
    variables or effects, or keeps values of clients for a later stage. What TensorFlow
    does not vectorise (convolutions, loops of the work's own) runs one by one. An event
    says why.
    """

    enabled: bool = True
    call_s: Seconds = 5.0
    jit: Literal["auto", "on", "off"] = "auto"
    vectorised_clients: Count = 1

    @pydantic.field_validator("jit", mode="before")
    @classmethod
    def _name(cls, value: object) -> object:
        return name_switch(value)


class Data(Frozen):
    """What may be read as data of clients.

    Attributes:
        protocols: of fsspec, such as "s3", that URIs in computations and arguments may
            have, in this process and in workers. Local files and "memory" always may.
        sequence_bytes: of one sequence that a call reads in this process from a
            dataset, a generator or another iterable: data without end become an error.
            In workers, `workers.client_bytes` counts. Lists are not held to it.
    """

    protocols: tuple[str, ...] = ()
    sequence_bytes: Annotated[Bytes, pydantic.Field(ge=1)] = 2**30


class Config(Frozen):
    """All settings of a context; short forms are accepted where noted.

    Attributes:
        backend: "ray", or "local" for threads of this process.
        workers: a `Workers`, or its count: an int or (min, max).
        subrounds: a `Subrounds`, or its count.
        clients_per_leaf: clients that are accumulated one after another before merging;
            decides the bits of a sum. None: a sixteenth of the cohort, 1 to 64.
        default_num_clients: the cohort of a computation without client arguments.
        seed: of all random numbers that computations draw.
        progress: a line that says what `init` and the first call of a computation wait
            for: "auto" shows it in a terminal and in a notebook, and writes it to the
            log (INFO) elsewhere; "on" writes to standard error elsewhere; "off" is
            silent.
        debug: with the local backend: clients run one after another on the thread that
            calls, Python functions inside of TensorFlow graphs included, so that
            breakpoints stop there; the bits are the same.
        retry: budgets of failures.
        stragglers: a `Stragglers`.
        kernels: a `Kernels`.
        data: a `Data`.
        kept_bytes: of clients' values that a call may keep where a later aggregation
            or the result needs them again: in the object store, or in this process.
            Clients past that, by index, do their work again; the bits do not depend
            on it.
        max_dropped_clients: of a round, whose work or data raised: it goes on without
            them, and its report names them. One more, or any where the result holds
            values of clients, and the error is raised.
        runtime_env: Ray's runtime environment of the job, when this process connects.

    Raises:
        ConfigError: a key is unknown or a value is out of range.
    """

    backend: Literal["ray", "local"] = "ray"
    workers: Workers = Workers()
    subrounds: Subrounds = Subrounds()
    clients_per_leaf: Count | None = None
    default_num_clients: CountOrNone = 0
    seed: Seed = 0
    progress: Literal["auto", "on", "off"] = "auto"
    debug: bool = False
    retry: Retry = Retry()
    stragglers: Stragglers = Stragglers()
    kernels: Kernels = Kernels()
    data: Data = Data()
    kept_bytes: Bytes = 512 * 2**20
    max_dropped_clients: CountOrNone = 0
    runtime_env: Environment | None = None

    def __init__(self, **data: Any) -> None:
        """Take fields or short forms; a signature of fields would forbid those."""
        super().__init__(**data)
        if self.debug and self.backend != "local":
            raise errors.ConfigError(
                'Expected backend="local" with `debug`, found'
                f' backend="{self.backend}": clients on actors cannot run on the'
                " thread that calls."
            )

    @pydantic.field_validator("progress", mode="before")
    @classmethod
    def _name(cls, value: object) -> object:
        return name_switch(value)

    @pydantic.field_validator(*COUNTED, mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        return expand_count(value)

    @property
    def driver_limits(self) -> read_limits.Limits:
        """What may be read in the process that calls."""
        advice = "Raise `data.sequence_bytes` if it is to be as large."
        return read_limits.Limits(self.data.sequence_bytes, advice, self.data.protocols)

    @property
    def worker_limits(self) -> read_limits.Limits:
        """What may be read where clients work."""
        if not self.workers.client_bytes:
            return self.driver_limits
        advice = "Raise `workers.client_bytes` if it is to be as large."
        return read_limits.Limits(
            self.workers.client_bytes, advice, self.data.protocols
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str] | None = None, **arguments: Any
    ) -> "Config":
        """Read settings from a YAML file, the environment and arguments.

        Args:
            path: of a YAML file; None reads none.
            **arguments: fields, which win over both.

        Raises:
            ConfigError: the file holds no mapping, or a setting is not one.
        """
        merged: dict[Any, Any] = {}
        environment = sources.read_environment(os.environ)
        for source in (sources.read_file(path), environment, arguments):
            merged = sources.merge(merged, expand_counts(source))
        unnamed = [key for key in merged if not isinstance(key, str)]
        if unnamed:
            raise errors.ConfigError(
                f"Expected settings with names, found the keys {unnamed}."
            )
        try:
            return cls(**merged)
        except errors.ConfigError as error:
            found = sources.variables_of(error.__cause__, expand_counts(arguments))
            if not found:
                raise
            told = f"{error} Set by: {', '.join(found)}."
            raise errors.ConfigError(told) from error.__cause__
