"""Settings of a context, read from YAML, the environment and arguments.

Later sources win: defaults, a YAML file, `RAY_FED_...` variables, arguments. When a
context is built with a `Config(...)`, variables set the fields that it leaves out. A
variable names a field, with two underscores between levels (`RAY_FED_RETRY__CRASH=5`).
Its value is YAML. The error for an unknown key suggests the nearest key. Errors name
the variable that a setting comes from. Settings, mappings and lists cannot be changed.
"""

import contextlib
import difflib
import html
import math
import numbers
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NoReturn, cast

import pydantic
import pydantic_core
import yaml
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.files import opening
from ray_fed.language.type_checks import is_whole
from ray_fed.values import read_limits


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise errors.ConfigError(
        "Expected no change of settings, found a change: build new settings with other"
        " values."
    )


class FrozenMapping(dict[str, Any]):
    """A dict that refuses changes. pydantic and pickle write it like a dict.

    Its hash is the hash of its names, because values may have no hash.
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
    """A list that refuses changes. pydantic and pickle write it like a list."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = _refuse
    reverse = sort = _refuse

    @override
    def __reduce__(self) -> Any:
        return FrozenList, (list(self),)


def freeze(value: Any) -> Any:
    """Return a copy of a value with frozen mappings and lists, at all depths."""
    match value:
        case Mapping():
            items = cast("Mapping[str, Any]", value).items()
            return FrozenMapping((name, freeze(member)) for name, member in items)
        case list():
            return FrozenList(map(freeze, cast("list[Any]", value)))
        case _:
            return value


MAX_WORKERS = 2**16
"""Largest number of workers in a pool, more than one Ray cluster holds."""

_MAX_BUDGET = 10**6
"""Largest budget of failures. Ray takes the sum of all budgets as a 32-bit number."""

_MAX_MEMORY = 2**48
"""Largest memory of a worker, in bytes. Ray counts in units of 0.0001 bytes."""

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL_KEY = re.compile(f"(?:[a-zA-Z0-9.-]{{1,253}}/)?{_LABEL}")
_LABEL_TERM = re.compile(rf"!?(?:{_LABEL}|in\({_LABEL}(?:, ?{_LABEL})*\))")

_GRAIN = 1e-4
"""Smallest amount of a resource that Ray allocates."""


def _read_whole(value: object) -> int:
    if not is_whole(value):
        raise pydantic_core.PydanticCustomError(
            "whole", "Input should be a whole number"
        )
    return int(value)


def _read_real(value: object) -> float:
    """Return a finite number, also from text, because YAML reads `1e3` as text."""
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
    own |= {setting: setting for setting in (*own.values(), "memory")}
    for name in resources:
        if name in own:
            raise pydantic_core.PydanticCustomError(
                "name", "Input should be given as `workers.{own}`", {"own": own[name]}
            )
        _check_printable(name)
    return resources


def _check_printable(name: str) -> str:
    if not name.isprintable() or not name:
        raise pydantic_core.PydanticCustomError(
            "name", "Names should be text that can be printed"
        )
    return name


def _check_labels(selector: Mapping[str, str]) -> Mapping[str, str]:
    for key, term in selector.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_TERM.fullmatch(term):
            raise pydantic_core.PydanticCustomError(
                "label",
                "`{key}: {term}` should be the name of a label and `value`, `!value`,"
                " `in(value, value)` or `!in(value, value)`. Names and values have at"
                " most 63 letters, digits, `-`, `_` and `.`",
                {"key": key, "term": term},
            )
    # Ray 2.60 takes a space for a part of the value that follows.
    return {key: term.replace(" ", "") for key, term in selector.items()}


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
Name = Annotated[str, pydantic.AfterValidator(_check_printable)]
Labels = Annotated[
    Mapping[str, str],
    pydantic.AfterValidator(_check_labels),
    pydantic.AfterValidator(freeze),
]
Environment = Annotated[Mapping[str, Any], pydantic.AfterValidator(freeze)]


COUNTED = ("workers", "subrounds")
"""Fields of `Config` for which users may pass only a count."""


def expand_count(value: object) -> object:
    """Return `{"count": value}` for a count, and any other value unchanged."""
    whole = isinstance(value, Mapping | pydantic.BaseModel | bool | None)
    return value if whole else {"count": value}


def expand_counts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with `expand_count` applied, so that sources can be merged."""
    return {
        key: expand_count(value) if key in COUNTED else value
        for key, value in settings.items()
    }


def _name_switch(value: object) -> object:
    names = {True: "on", False: "off"}  # what YAML makes of the bare words
    return names[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], pydantic.BeforeValidator(_name_switch)]


def _read_size(value: object) -> int | tuple[int, int] | None:
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
_NO_SETTINGS = (tracebacks.VARIABLE, tracebacks.GRAPH_CACHE)
_MAX_YAML_BYTES = 2**18
_NO_YAML = (OSError, yaml.YAMLError, ValueError, TypeError, RecursionError)
"""Exceptions for text that is not YAML: not UTF-8, an impossible date, too deep."""


def variables_of(error: object, arguments: Mapping[str, Any]) -> list[str]:
    """Return the `RAY_FED_...` variables that set the wrong fields of an error.

    Fields that `arguments` set are left out.
    """
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
    """Return whether settings have a value at a path, or at the beginning of it."""
    for part in path:
        if not isinstance(settings, Mapping):
            return True
        named = {str(k): v for k, v in cast("Mapping[Any, Any]", settings).items()}
        if part not in named:
            return False
        settings = named[part]
    return True


def read_file(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Read settings from a YAML file. If `path` is None, there are no settings.

    Raises:
        ConfigError: The file is missing, too long, not YAML, or not a mapping.
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
        ConfigError: The value of a variable is not YAML.
    """
    settings: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(_PREFIX) or variable in _NO_SETTINGS:
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
    """Merge the settings of two sources. If both have a setting, `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, Mapping):
            merged[key] = merge(cast("dict[str, Any]", under), cast("Any", value))
        else:
            merged[key] = value
    return merged


def explain(error: pydantic.ValidationError, model: type[pydantic.BaseModel]) -> str:
    """Return a message for pydantic's error: each wrong setting and legal values."""
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
        if part in model.model_fields:  # else a name in `worker_groups`
            found = model.model_fields[part].annotation
            is_model = isinstance(found, type) and issubclass(found, pydantic.BaseModel)
            model = cast("Any", found) if is_model else Workers
    return list(model.model_fields)


class Frozen(pydantic.BaseModel):
    """Base class of settings. The repr shows what differs from the defaults."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    @override
    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
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
    """The pool of actors that do the work of clients.

    Attributes:
        count: Number of actors. With (min, max), each round uses as many as the cluster
            has room for. With None, there is one actor for each CPU of the cluster, or
            of the placement group of this process. If `num_gpus` is not 0, there is one
            for each GPU instead.
        num_cpus: CPUs of each actor. It has max(1, int(num_cpus)) TensorFlow threads.
        num_gpus: GPUs of each actor, at most 1, because its executor works on one
            device. A fraction becomes a memory limit of TensorFlow.
        memory: Bytes of a node's memory that Ray reserves for each actor. Ray does not
            limit the actor to it.
        accelerator_type: Name that Ray has for the accelerator of the actors' nodes,
            such as "H100". None allows every node.
        resources: Other Ray resources of each actor.
        label_selector: Labels of the nodes on which actors may run. A value is
            "value", "!value", "in(value, value)" or "!in(value, value)". Nodes without
            the label match only the forms with "!".
        start_timeout_s: Seconds within which an actor that has room must be ready.
        client_bytes: Bytes of clients' data, from `program.ClientData` or local files,
            that each actor keeps between rounds. This process keeps copies of lists of
            clients, up to the same size. The setting also limits the size of one
            sequence that an actor reads from a dataset, a generator or another
            iterable. With 0, an actor caches nothing, and `data.sequence_bytes` limits
            its reads.
        wait_timeout_s: Seconds that a round waits for room in the cluster for the
            actors that it needs: min of `count`, or one. The seconds begin anew
            whenever an actor gets room or a subround ends. Time does not count while an
            actor starts or is busy.
        allow_mixed: Whether actors may have other versions of packages than the driver,
            and differ in devices, processors or threads, which decide result bits.
    """

    count: Size = None
    num_cpus: Annotated[Amount, pydantic.Field(gt=0)] = 1.0
    num_gpus: Amount = 0.0
    memory: Annotated[Bytes, pydantic.Field(le=_MAX_MEMORY)] = 0
    accelerator_type: Name | None = None
    resources: Amounts = pydantic.Field(default={}, validate_default=True)
    label_selector: Labels = pydantic.Field(default={}, validate_default=True)
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


WorkerGroups = Annotated[
    Mapping[Name, Annotated[Workers, pydantic.BeforeValidator(expand_count)]],
    pydantic.AfterValidator(freeze),
]


class Retry(Frozen):
    """How many failures of each kind a subround may have before its round fails.

    Attributes:
        crash: Number of times that a process or node may die, or an object may be lost.
        preemption: Number of times that a node may be taken away with notice.
        memory: Number of times that a process may run out of memory.
        hang: Number of times that a worker may take longer than `subrounds.timeout_s`.
    """

    crash: Budget = 3
    preemption: Budget = 10
    memory: Budget = 2
    hang: Budget = 1


class Subrounds(Frozen):
    """How the clients of a round are divided into subrounds. A worker runs a subround.

    Attributes:
        count: Number of subrounds in a round. None means one for each worker. The bits
            of a result do not depend on it.
        timeout_s: Seconds that a worker may take for a subround. None means no limit. A
            worker that takes longer is replaced, and the subround runs again, as often
            as `retry.hang` allows. Waiting for a worker does not count.
    """

    count: Count | None = None
    timeout_s: Seconds | None = None


class Stragglers(Frozen):
    """When a slow subround also runs on a second, idle worker.

    The first result counts. Both results have the same bits. Other effects of client
    work, such as files that it writes, happen twice.

    Attributes:
        enabled: Whether slow subrounds run a second time.
        factor: Ratio from which on a subround is slow, > 1: its time divided by the
            median time of the round's subrounds of its kind. Half of them must be done.
        min_s: Seconds that a subround must have had its worker before it can be slow.
    """

    enabled: bool = True
    factor: Annotated[Real, pydantic.Field(gt=1, le=10**9)] = 3.0
    min_s: Seconds = 10.0


class Kernels(Frozen):
    """How the work of many clients becomes one graph that loops over them.

    `jit` and `vectorized_clients` decide the bits of a result. They do not apply to
    work that draws random numbers, has effects other than checks, or keeps values of
    clients for a later stage. Work that TensorFlow cannot vectorize, such as
    convolutions and loops, runs one client at a time. An event says why.

    Attributes:
        enabled: Whether to build such graphs, which are called kernels. Work without a
            kernel is interpreted, call by call.
        call_s: Approximate seconds of client work in one call of a kernel. On Ray,
            cancelling waits for the end of a call. The bits of a result do not depend
            on it.
        jit: Whether XLA compiles the work of clients whose data have one shape, once
            for each shape and worker. "auto" does so if a rule predicts a gain. The
            rule depends only on the computation, the sizes and the kind of device (see
            docs/performance.md). `RoundReport.jit_decisions` has its decisions. With
            XLA, an index or a label out of range is not an error.
        vectorized_clients: Number of clients with data of one shape to compute at once,
            in the memory of all of them. Use it for small models on a GPU.
    """

    enabled: bool = True
    call_s: Seconds = 5.0
    jit: Switch = "auto"
    vectorized_clients: Count = 1


class Data(Frozen):
    """Limits on the data that may be read for clients.

    Attributes:
        protocols: Protocols of fsspec, such as "s3", that URIs in computations and
            arguments may have, in this process and in workers. Local files and "memory"
            are always allowed.
        sequence_bytes: Largest size of one sequence that a call reads in this process
            from a dataset, a generator or another iterable, so that endless data is an
            error. In workers, `workers.client_bytes` is the limit. Lists have no limit.
    """

    protocols: tuple[str, ...] = ()
    sequence_bytes: Annotated[Bytes, pydantic.Field(ge=1)] = 2**30


class Config(Frozen):
    """All settings of a context.

    Attributes:
        backend: "ray", or "local" for threads of this process.
        workers: The `Workers`, or only their count: an int or (min, max).
        worker_groups: More `Workers`, or only their counts, by the name of a group. A
            call runs on `workers`, or on a group in `with context.on_workers(name)`.
        subrounds: The `Subrounds`, or only their count.
        clients_per_leaf: Number of clients that are accumulated one after another
            before merging. It decides the bits of a sum. None means a sixteenth of the
            cohort, at least 1 and at most 64.
        default_num_clients: Size of the cohort of a computation without client
            arguments.
        seed: Seed of all random numbers that computations draw.
        name: Name of the run in Ray's lists, logs and metrics. With None, the name is
            the script's, such as "train.py".
        progress: A line that says what `init` and calls wait for. "auto" shows it in a
            terminal and in a notebook, and writes it to the log (INFO) elsewhere. "on"
            writes it to standard error elsewhere. "off" is silent. Waiting for room is
            always in the log (WARNING).
        debug: Whether clients run one after another on the calling thread, with Python
            functions inside TensorFlow graphs, so that breakpoints stop there. It needs
            the local backend. The bits are the same.
        retry: How many failures are retried.
        stragglers: When a slow subround runs a second time.
        kernels: How the work of clients becomes one graph.
        data: Limits on the data that may be read for clients.
        kept_bytes: Bytes of clients' values that a call may keep for a later
            aggregation or for the result, in the object store or in this process. Other
            clients do their work again. The bits do not depend on it.
        max_dropped_clients: Number of clients in a round whose work or data may raise
            an error. The round continues without them, and its report names them. If
            more clients raise, or the result has values of clients, the call fails.
        runtime_env: Ray's runtime environment of the job, used when this process
            connects to Ray.

    Raises:
        ConfigError: A key is unknown or a value is out of range.
    """

    backend: Literal["ray", "local"] = "ray"
    workers: Workers = Workers()
    worker_groups: WorkerGroups = pydantic.Field(default={}, validate_default=True)
    subrounds: Subrounds = Subrounds()
    clients_per_leaf: Count | None = None
    default_num_clients: CountOrNone = 0
    seed: Seed = 0
    name: Name | None = None
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
        """Accept fields and short forms, such as a count in place of `Workers`."""
        super().__init__(**data)
        if self.debug and self.backend != "local":
            raise errors.ConfigError(
                'Expected backend="local" with `debug`, found'
                f' backend="{self.backend}": clients on actors cannot run on the'
                " thread that calls."
            )
        groups = {"workers": self.workers} | {
            f"worker_groups.{name}": group for name, group in self.worker_groups.items()
        }
        unsized = [name for name, group in groups.items() if group.count is None]
        if self.worker_groups and unsized:
            raise errors.ConfigError(
                f"Expected a `{unsized[0]}.count`, found none: with `worker_groups`,"
                " say how many workers each group has."
            )
        if self.worker_groups and self.backend != "ray":
            raise errors.ConfigError(
                'Expected backend="ray" with `worker_groups`, found'
                f' backend="{self.backend}": threads are all alike.'
            )

    @pydantic.field_validator(*COUNTED, mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        return expand_count(value)

    @property
    def driver_limits(self) -> read_limits.Limits:
        """Limits on the data that this process reads."""
        advice = "If the data should be so large, raise `data.sequence_bytes`."
        return read_limits.Limits(self.data.sequence_bytes, advice, self.data.protocols)

    @property
    def worker_limits(self) -> read_limits.Limits:
        """Limits on the data that workers read."""
        if not self.workers.client_bytes:
            return self.driver_limits
        advice = "If the data should be so large, raise `workers.client_bytes`."
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
            path: Path of a YAML file, or None.
            **arguments: Fields, which win over the file and the environment.

        Raises:
            ConfigError: The file is not a mapping, or a setting is wrong.
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


def resolve_config(config: object) -> Config:
    """Return the settings of a context.

    `RAY_FED_...` variables set the fields that the caller left out.

    Args:
        config: A caller's settings, or None.

    Raises:
        ConfigError: `config` is not a `Config`, or a variable is not a setting.
    """
    if config is None:
        return Config.load()
    if not isinstance(config, Config):
        raise errors.ConfigError(
            f"Expected a ray_fed.Config, found a {type(config).__name__}: pass"
            " ray_fed.Config(...) with the settings as its arguments."
        )
    if not read_environment(os.environ):
        return config
    return Config.load(**config.model_dump(exclude_unset=True))


def check_address(address: object) -> None:
    """Raise ConfigError unless an address is text, or None."""
    if address is not None and not isinstance(address, str):
        raise errors.ConfigError(
            'Expected an `address` of Ray as text, such as "local", "auto" or'
            f' "host:6379", found `{errors.describe(address)}`: pass settings as'
            " `config`."
        )
