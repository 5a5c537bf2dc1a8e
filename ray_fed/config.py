"""Settings: one frozen tree, read from YAML, the environment and arguments.

Later sources win: defaults, a YAML file, `RAY_FED_...` variables, arguments. A variable
names a field, with two underscores between levels (`RAY_FED_RETRY__CRASH=5`), and its
value is read as YAML. Unknown keys are refused, with the nearest one. Mappings and
lists are frozen, too; an error names where a setting comes from.
"""

import contextlib
import difflib
import html
import math
import numbers
import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NoReturn, cast

import pydantic
import pydantic_core
import yaml
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.files import opening
from ray_fed.values import read_limits


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise errors.ConfigError(
        "Expected settings that stay as they are, found a change of one: build new"
        " settings with other values."
    )


class FrozenMapping(dict[str, Any]):
    """A dict that refuses changes; it is dumped and pickled as a dict is.

    Its hash is that of its names, as values need not have one.
    """

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    @override
    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self))

    @override
    def __reduce__(self) -> Any:
        return FrozenMapping, (dict(self),)


class FrozenList(list[Any]):
    """A list that refuses changes; it is dumped and pickled as a list is."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = _refuse
    reverse = sort = _refuse

    @override
    def __reduce__(self) -> Any:
        return FrozenList, (list(self),)


def freeze(value: Any) -> Any:
    """Return a value whose mappings and lists are frozen copies, at all depths."""
    match value:
        case Mapping():
            items = cast("Mapping[str, Any]", value).items()
            return FrozenMapping((name, freeze(member)) for name, member in items)
        case list():
            return FrozenList(map(freeze, cast("list[Any]", value)))
        case _:
            return value


MAX_WORKERS = 2**16
"""Of one pool: beyond what one Ray cluster holds."""

_MAX_BUDGET = 10**6
"""Of failures: Ray takes the sum of all budgets as one 32-bit number."""

_GRAIN = 1e-4
"""The smallest part of a resource that Ray gives."""


def _read_whole(value: object) -> int:
    """Return a whole number of Python's or numpy's; nothing else is taken for one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise pydantic_core.PydanticCustomError(
            "whole", "Input should be a whole number"
        )
    return int(value)


def _read_real(value: object) -> float:
    """Return a number that is finite; YAML hands in `1e3` as text."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real | str):
        with contextlib.suppress(ValueError, OverflowError):
            found = float(value)
            if math.isfinite(found):
                return found
    raise pydantic_core.PydanticCustomError("real", "Input should be a finite number")


def _check_grain(value: float) -> float:
    if 0 < value < _GRAIN:
        raise pydantic_core.PydanticCustomError(
            "grain", "Input should be 0 or at least 0.0001, the least that Ray gives"
        )
    return value


def _check_names(resources: Mapping[str, float]) -> Mapping[str, float]:
    own = {"CPU": "num_cpus", "GPU": "num_gpus"}
    own |= {setting: setting for setting in own.values()}
    for name in resources:
        if name in own:
            raise pydantic_core.PydanticCustomError(
                "name", "Input should be given as `workers.{own}`", {"own": own[name]}
            )
        if not name.isprintable() or not name:
            raise pydantic_core.PydanticCustomError(
                "name", "Names of resources should be text that can be printed"
            )
    return resources


_Whole = Annotated[int, pydantic.BeforeValidator(_read_whole)]
Real = Annotated[float, pydantic.BeforeValidator(_read_real)]

Count = Annotated[_Whole, pydantic.Field(ge=1, lt=2**31)]
CountOrNone = Annotated[_Whole, pydantic.Field(ge=0, lt=2**31)]
Budget = Annotated[_Whole, pydantic.Field(ge=0, le=_MAX_BUDGET)]
Bytes = Annotated[_Whole, pydantic.Field(ge=0, lt=2**63)]
Seed = Annotated[_Whole, pydantic.Field(gt=-(2**128), lt=2**128)]
Seconds = Annotated[Real, pydantic.Field(gt=0, le=10**9)]
Amount = Annotated[
    Real, pydantic.Field(ge=0, le=2**31), pydantic.AfterValidator(_check_grain)
]
Amounts = Annotated[
    Mapping[str, Amount],
    pydantic.AfterValidator(_check_names),
    pydantic.AfterValidator(freeze),
]
Environment = Annotated[Mapping[str, Any], pydantic.AfterValidator(freeze)]


COUNTED = ("workers", "subrounds")
"""Fields whose short form is a count."""


def expand_count(value: object) -> object:
    """Return a count as the settings that it is short for; the rest as it is."""
    whole = isinstance(value, Mapping | pydantic.BaseModel | bool | None)
    return value if whole else {"count": value}


def expand_counts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without short forms, so that sources can be merged."""
    return {
        key: expand_count(value) if key in COUNTED else value
        for key, value in settings.items()
    }


def _name_switch(value: object) -> object:
    """Return "on" or "off" for a truth value; the rest as it is."""
    names = {True: "on", False: "off"}  # what YAML makes of the bare words
    return names[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], pydantic.BeforeValidator(_name_switch)]


def _read_size(value: object) -> int | tuple[int, int] | None:
    """Return a count, or the ends of a range; None as it is."""
    match value:
        case None:
            return None
        case (first, last):
            ends = _size_of(first), _size_of(last)
            if ends[0] <= ends[1]:
                return ends
        case _:
            return _size_of(value)
    raise _size_error()


def _size_of(value: object) -> int:
    try:
        size = _read_whole(value)
    except pydantic_core.PydanticCustomError as error:
        raise _size_error() from error
    if not 1 <= size <= MAX_WORKERS:
        raise _size_error()
    return size


def _size_error() -> pydantic_core.PydanticCustomError:
    return pydantic_core.PydanticCustomError(
        "size",
        "Input should be a count >= 1, or (min, max) with 1 <= min <= max, of at most"
        " {most} workers",
        {"most": MAX_WORKERS},
    )


Size = Annotated[int | tuple[int, int] | None, pydantic.BeforeValidator(_read_size)]


_PREFIX = "RAY_FED_"
_MAX_YAML_BYTES = 2**18
_NO_YAML = (OSError, yaml.YAMLError, ValueError, TypeError, RecursionError)
"""What is raised for text that is no YAML: no UTF-8, no such date, too deep."""


def variables_of(error: object, arguments: Mapping[str, Any]) -> list[str]:
    """Return the variables that hold settings which an error is about."""
    details = error.errors() if isinstance(error, pydantic.ValidationError) else []
    paths = [[str(part) for part in detail["loc"]] for detail in details]
    paths = [path for path in paths if not _holds(arguments, path)]
    return [
        variable
        for variable, text in sorted(os.environ.items())
        if variable.startswith(_PREFIX)
        and any(_holds(read_environment({variable: text}), path) for path in paths)
    ]


def _holds(settings: Any, path: list[str]) -> bool:
    """Return whether settings decide the one at a path, alone or with others."""
    for part in path:
        if not isinstance(settings, Mapping):
            return True
        named = {str(k): v for k, v in cast("Mapping[Any, Any]", settings).items()}
        if part not in named:
            return False
        settings = named[part]
    return True


def read_file(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Read settings from a YAML file; without a path there are none.

    Raises:
        ConfigError: the file is missing, too long, no YAML, or holds no mapping.
    """
    if path is None:
        return {}
    try:
        with opening.open_regular(path) as file:
            text = file.read(_MAX_YAML_BYTES + 1)
        if len(text) > _MAX_YAML_BYTES:
            raise ValueError(f"more than {_MAX_YAML_BYTES} bytes")
        loaded = cast("object", yaml.safe_load(text.decode("utf-8")))
    except _NO_YAML as error:
        raise errors.ConfigError(
            f"Expected a YAML file at `{path}`, found: {error}"
        ) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise errors.ConfigError(
            f"Expected `{path}` to hold a mapping of settings, found a"
            f" {type(loaded).__name__}."
        )
    return cast("dict[str, Any]", loaded)


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read settings from `RAY_FED_...` variables.

    Raises:
        ConfigError: the value of a variable is no YAML.
    """
    settings: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(_PREFIX) or variable == tracebacks.VARIABLE:
            continue
        try:
            value: Any = yaml.safe_load(text)
        except _NO_YAML as error:
            raise errors.ConfigError(
                f"Expected YAML in the variable `{variable}`, found"
                f" `{errors.describe(text)}`."
            ) from error
        for name in reversed(variable.removeprefix(_PREFIX).lower().split("__")):
            value = {name: value}
        settings = merge(settings, expand_counts(value))
    return settings


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of two sources; where both have one, `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, Mapping):
            merged[key] = merge(cast("dict[str, Any]", under), cast("Any", value))
        else:
            merged[key] = value
    return merged


def explain(error: pydantic.ValidationError, model: type[pydantic.BaseModel]) -> str:
    """Return an error's text: each setting that is wrong, and what is legal there."""
    return " ".join(
        __explain_one(cast("Any", detail), model) for detail in error.errors()
    )


def __explain_one(detail: dict[str, Any], model: type[pydantic.BaseModel]) -> str:
    path = [str(part) for part in detail["loc"]]
    name = ".".join(path)
    if detail["type"] != "extra_forbidden":
        reason = detail["msg"][0].lower() + detail["msg"][1:]
        found = errors.describe(detail["input"])
        return f"Expected a legal `{name}`, found `{found}`: {reason}."
    legal = sorted(_fields_at(path[:-1], model))
    near = difflib.get_close_matches(path[-1], legal, n=1, cutoff=0.5)
    hint = f": did you mean `{'.'.join([*path[:-1], *near])}`?" if near else "."
    return f"Expected one of the settings {legal}, found `{name}`{hint}"


def _fields_at(path: list[str], model: type[pydantic.BaseModel]) -> list[str]:
    for part in path:
        model = cast("Any", model.model_fields[part].annotation)
    return list(model.model_fields)


class Frozen(pydantic.BaseModel):
    """Settings, which show what differs from their defaults."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    @override
    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Return what differs from the defaults."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.get_default(call_default_factory=True):
                yield name, value

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name}</td><td>{html.escape(repr(value))}</td></tr>"
            for name, value in self.__repr_args__()
        )
        name = type(self).__name__
        return (
            f"<table><caption>{name}: what differs from the defaults</caption>"
            f"<tbody>{rows or '<tr><td>nothing</td></tr>'}</tbody></table>"
        )

    @tracebacks.shorten
    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except pydantic.ValidationError as error:
            # The context, which is not shown, tells `load` which settings are wrong.
            raise errors.ConfigError(explain(error, type(self))) from None

    # pydantic builds nested settings past this `__init__`: errors name the full path.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]


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
            actor keeps between rounds; of lists of clients that come again, which this
            process copies; also of one sequence that it reads from a dataset, a
            generator or another iterable. With 0 it keeps nothing, and reads as much as
            `data` says.
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
        timeout_s: seconds that a worker may take for a subround, from its start: one
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
        call_s: seconds of clients that one call may cover, about. On Ray, cancelling
            waits for a call to end; the bits of a result do not depend on it.
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
    jit: Switch = "auto"
    vectorised_clients: Count = 1


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
    progress: Switch = "auto"
    debug: bool = False
    retry: Retry = Retry()
    stragglers: Stragglers = Stragglers()
    kernels: Kernels = Kernels()
    data: Data = Data()
    kept_bytes: Bytes = 512 * 2**20
    max_dropped_clients: CountOrNone = 0
    runtime_env: Environment | None = None

    @tracebacks.shorten
    def __init__(self, **data: Any) -> None:
        """Take fields or short forms; a signature of fields would forbid those."""
        super().__init__(**data)
        if self.debug and self.backend != "local":
            raise errors.ConfigError(
                'Expected backend="local" with `debug`, found'
                f' backend="{self.backend}": clients on actors cannot run on the'
                " thread that calls."
            )

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
    @tracebacks.shorten
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
        environment = read_environment(os.environ)
        for source in (read_file(path), environment, arguments):
            merged = merge(merged, expand_counts(source))
        unnamed = [key for key in merged if not isinstance(key, str)]
        if unnamed:
            raise errors.ConfigError(
                f"Expected settings with names, found the keys {unnamed}."
            )
        try:
            return cls(**merged)
        except errors.ConfigError as error:
            found = variables_of(error.__context__, expand_counts(arguments))
            if not found:
                raise
            told = f"{error} Set by: {', '.join(found)}."
            raise errors.ConfigError(told) from None


def check_config(config: object) -> Config:
    """Return settings that a caller gave; the defaults for None.

    Raises:
        ConfigError: they are no `Config`.
    """
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise errors.ConfigError(
            f"Expected a ray_fed.Config, found a {type(config).__name__}: pass"
            " ray_fed.Config(...) with the settings as its arguments."
        )
    return config
