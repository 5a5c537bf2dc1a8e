"""`learning.sweep`: the runs of all parameters and seeds, as one table.

    run_one(rate=0.1, seed=0, storage_path="sweep/rate=0.1,seed=0")
    run_one(rate=0.1, seed=1, storage_path="sweep/rate=0.1,seed=1")
    run_one(rate=0.3, seed=0, storage_path="sweep/rate=0.3,seed=0")
    ...

One run of a sweep is called a trial. Trials run one after another in one process, and
share what TensorFlow traced and compiled. A trial begins as in a new process: Keras
counts names as it did before the first trial, random numbers are seeded, and calls of
the context are numbered anew. So the bits of a trial depend on its parameters and seed,
and not on the trials before it.

    sweep_0.zip             the names of the parameters
    rate=0.1,seed=0/        a run, as `learning.run` saves it
        finished_0.zip      why it ended, and which function ran it
"""

import collections
import contextlib
import dataclasses
import inspect
import itertools
import logging
import os
import types
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import keras
import numpy as np
from keras.src.backend.common import global_state  # no public name
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.imports import import_extra
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.checks import expect_one_of
from ray_fed.learning.history import History, is_curve, new_panels, use_whole_rounds
from ray_fed.learning.run_fingerprint import describe_settings, find_context
from ray_fed.learning.run_loop import TrainingResult
from ray_fed.observability import reprs
from ray_fed.program import ClientData
from ray_fed.program.checkpoint_store import Versions
from ray_fed.program.descriptions import describe_value, digest, find_globals

_logger = logging.getLogger(__name__)

Value: TypeAlias = bool | int | float | str | None
"""Value of a parameter."""

_PLAIN = (bool, int, float, str, types.NoneType)
_SWEEP, _FINISHED = "sweep_", "finished_"
_COLUMNS = ("seed", "rounds", "reason", "seconds")
_MAX_SEED = 2**32 - 1  # the limit of NumPy

_CALLS_A_SEED, _SEEDS_APART = 10**5, 9000
"""Numbers of calls that the trials of one seed have, below the numbers of calls that
`evaluate` makes. So trials of different seeds draw different numbers, such as noise."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        parameters: Values of the parameters by name.
        seed: Seed of the run.
        history: Records of the rounds. Empty if the trial failed.
        reason: Why the run ended, see `TrainingResult`, or "failed".
        error: Error of a failed trial, as text. None for other trials.
    """

    parameters: Mapping[str, Value]
    seed: int
    history: History = dataclasses.field(repr=False)
    reason: str
    error: str | None = None

    def row(self) -> dict[str, Any]:
        """Return the trial as a row of the table; see `SweepResult.to_pandas`."""
        last: dict[str, float] = {}
        for record in self.history:
            last |= record.numbers()
        return {
            **self.parameters,
            "seed": self.seed,
            "rounds": len(self.history),
            "reason": self.reason,
            "seconds": sum(record.seconds for record in self.history),
            **last,
        }


@dataclasses.dataclass(frozen=True, repr=False)
class SweepResult:
    """The trials of a sweep.

    Attributes:
        trials: Trials in the order in which they ran: all seeds of the first values of
            the parameters, then all seeds of the next values.
        names: Names of the parameters.
        reason: "finished", or "interrupted" if a signal ended a run that was called
            with `on_signal="return"`. The interrupted trial and the trials after it are
            missing.
    """

    trials: Sequence[Trial]
    names: Sequence[str]
    reason: Literal["finished", "interrupted"] = "finished"

    @override
    def __repr__(self) -> str:
        over = ", ".join([*self.names, "seed"])
        return f"<sweep over {over}: {len(self.trials)} trials, {self.reason}>"

    def _repr_html_(self) -> str:
        rows = [trial.row() for trial in self.trials]
        return reprs.draw_table(f"{len(rows)} trials, {self.reason}", rows)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each trial.

        The columns are the parameters, `seed`, `rounds`, `reason`, `seconds` (the sum
        of `RoundRecord.seconds`), and the last value of each metric, named as in
        `History.names`. A failed trial has no metrics.

        Raises:
            UserError: pandas is not installed.
        """
        pandas = import_extra("pandas", "SweepResult.to_pandas")
        columns = [*self.names, *_COLUMNS, *self._metrics()]
        return pandas.DataFrame([t.row() for t in self.trials], columns=columns)

    @tracebacks.shorten
    def summary(self, *metrics: str) -> Any:
        """Return a pandas DataFrame of means over seeds, by values of the parameters.

        Its index has these values. Each metric has three columns: `(metric, "mean")`
        and `(metric, "std")` of the last values over seeds, and `(metric, "count")`,
        the number of these seeds. `std` is the sample standard deviation, with the
        divisor `count - 1`. It is NaN for a single seed.

        Args:
            *metrics: Names as for `History.values`. By default these are all metrics.

        Raises:
            ConfigError: There is no such metric.
            UserError: pandas is not installed.
        """
        frame = self.to_pandas()
        chosen = self._full_names(metrics) or self._metrics()
        # A sweep over seeds alone has one row.
        keys = list(self.names) or np.full(len(frame), "all")
        groups = frame.groupby(keys, sort=False, dropna=False)
        return groups[chosen].agg(["mean", "std", "count"])

    @tracebacks.shorten
    def plot(self, *metrics: str) -> Any:
        """Return a matplotlib figure with a panel for each metric.

        For each combination of the parameters' values, a panel has a line: the mean
        over seeds by round. Its band is one sample standard deviation wide on each
        side. A line has the rounds that all its seeds have.

        Args:
            *metrics: Names as for `History.values`. By default these are all metrics
                except numbers of examples and elements of arrays.

        Raises:
            ConfigError: There is no such metric, or no round.
            UserError: matplotlib is not installed.
        """
        chosen = self._full_names(metrics) or list(filter(is_curve, self._metrics()))
        if not chosen:
            raise errors.ConfigError(
                "Expected trials with metrics to plot, found"
                f" {len(self.trials)} without any number."
            )
        groups: dict[str, list[History]] = {}
        for trial in self.trials:
            if trial.history:
                label = _describe_values(trial.parameters)
                groups.setdefault(label, []).append(trial.history)
        figure, panels = new_panels(len(chosen))
        for panel, name in zip(panels, chosen, strict=True):
            for index, (label, histories) in enumerate(groups.items()):
                color = _color_of(index, len(groups))
                _plot_group(panel, name, histories, label=label, color=color)
            panel.set(xlabel="round", ylabel=name)
            use_whole_rounds(panel)
        if self.names:
            panels[0].legend(fontsize="small")
        return figure

    def _metrics(self) -> list[str]:
        names = (name for trial in self.trials for name in trial.history.names())
        return list(dict.fromkeys(names))

    def _full_names(self, metrics: Sequence[str]) -> list[str]:
        histories = [trial.history for trial in self.trials if trial.history]
        if metrics and not histories:
            raise errors.ConfigError(
                f"Expected trials with the metrics {list(metrics)}, found"
                f" {len(self.trials)} without any round."
            )
        return [histories[0].full_name(metric) for metric in metrics]


def _color_of(index: int, count: int) -> Any:
    import matplotlib as mpl

    if count <= 10:  # noqa: PLR2004 (colors of matplotlib's cycle)
        return f"C{index}"
    return mpl.colormaps["viridis"](index / (count - 1))


def _plot_group(
    panel: Any, name: str, histories: Sequence[History], label: str, color: Any
) -> None:
    values: dict[int, list[float]] = {}
    for history in histories:
        for record, value in zip(history, history.values(name), strict=True):
            if value is not None:
                values.setdefault(record.round, []).append(value)
    common = {r: v for r, v in sorted(values.items()) if len(v) == len(histories)}
    rounds, means = list(common), np.array([np.mean(v) for v in common.values()])
    panel.plot(rounds, means, color=color, marker=".", label=label)
    if len(histories) > 1:
        width = np.array([np.std(v, ddof=1) for v in common.values()])
        panel.fill_between(
            rounds, means - width, means + width, color=color, alpha=0.2, linewidth=0
        )


@tracebacks.shorten
def sweep(
    run_one: Callable[..., TrainingResult],
    parameters: Mapping[str, Iterable[Value]],
    *,
    seeds: Iterable[int] = (0,),
    storage_path: str | os.PathLike[str] | None = None,
    on_error: Literal["raise", "log"] = "raise",
) -> SweepResult:
    """Run a training for all combinations of parameters and seeds.

        def run_one(rate, seed, storage_path):
            model = ...
            training = learning.build_fed_avg(model, keras.optimizers.SGD(rate))
            return learning.run(
                training, clients, num_rounds=10, cohort_size=5, seed=seed,
                storage_path=storage_path,
            )

        learning.sweep(run_one, {"rate": [0.1, 0.3]}, seeds=range(3))

    Trials run one after another. Before each trial, `keras.utils.set_random_seed(seed)`
    is called, Keras counts the names of layers as before the first trial, and calls of
    the default context get numbers that depend on the seed alone. So the bits of a
    trial do not depend on other trials. Trials that differ in learning rates alone
    share traces and compiled graphs, also if each of them builds its own model.

    With a `storage_path`, the same call resumes the sweep. A finished trial is read
    from its folder and is not run again, as long as the context has the same settings
    and `run_one` is the same function. Its code, functions of its module that it calls,
    and values that it uses, such as numbers, lists and arrays, are compared. After a
    change, `run_one` is called again, and `learning.run` continues the saved run or
    refuses it. The same happens if `run_one` is no plain function or uses an object
    whose text does not describe it, such as an optimizer. A trial that was stopped
    continues from its checkpoint.

    Args:
        run_one: Function that is called with a value of each parameter, `seed` and
            `storage_path`, by name, and returns the result of `learning.run`. It must
            pass `storage_path` on to `learning.run`. This is the trial's own folder, or
            None without a `storage_path` of the sweep.
        parameters: Values of each parameter: numbers, text, booleans or None. An empty
            mapping runs each seed once.
        seeds: Seeds of the trials, from 0 to 2**32 - 1, each once.
        storage_path: Folder for this sweep alone, as a path or a URI of fsspec. A later
            call may have more or fewer values and seeds. None: nothing is saved.
        on_error: What follows if a trial raises. "raise" ends the sweep. "log" logs the
            error and counts the trial as failed. The same call runs it again.

    Returns:
        The trials. They have no states: read these from the folders of the trials.

    Raises:
        ConfigError: A parameter has no values or a value twice, `run_one` does not take
            a parameter or does not save its run, or `storage_path` has a run or a sweep
            over other parameters.
        ValueMismatchError: `run_one` returns another value than a `TrainingResult`.
        StorageError: `storage_path` cannot be read or written.
        KeyboardInterrupt: SIGINT came. It ends the whole sweep. With a `storage_path`,
            finished trials and the last round of the running trial are saved.
        SystemExit: SIGTERM came, with the same consequences.
        Exception: An error of `run_one`. A note names the trial.
    """
    values = _read_parameters(parameters)
    read = [read_whole("seeds", seed, 0, _MAX_SEED) for seed in _listed("seeds", seeds)]
    _check_values("seeds", read)
    _check_function(run_one, values)
    expect_one_of("on_error", on_error, ("raise", "log"))
    root = None if storage_path is None else os.fspath(storage_path)
    if root is not None:
        _open_storage(root, list(values))
    function = None if root is None else _identify(run_one)
    combinations = itertools.product(*values.values(), read)
    arguments: list[dict[str, Any]] = [
        dict(zip([*values, "seed"], c, strict=True)) for c in combinations
    ]
    trials: list[Trial] = []
    reason: Literal["finished", "interrupted"] = "finished"
    with _beginning_alike() as begin:
        for number, given in enumerate(arguments, 1):
            name = _describe_values(given)
            place = None if root is None else _place_of(root, given)
            trial = None if place is None else _find_finished(place, given, function)
            if trial is None:
                _logger.info("Trial %d of %d: %s.", number, len(arguments), name)
                begin(given["seed"])
                try:
                    trial = _run_trial(run_one, given, place, function)
                except Exception as error:
                    if on_error == "raise":
                        error.add_note(f"In the trial {name} of the sweep.")
                        raise
                    _logger.exception("The trial %s failed.", name)
                    trial = _make_trial(given, History(), "failed", str(error))
            if trial.reason == "interrupted":
                _logger.warning("The sweep was interrupted in the trial %s.", name)
                reason = "interrupted"
                break
            trials.append(trial)
    return SweepResult(trials, list(values), reason)


def _make_trial(
    given: Mapping[str, Any], history: History, reason: str, error: str | None = None
) -> Trial:
    parameters = {name: value for name, value in given.items() if name != "seed"}
    return Trial(parameters, given["seed"], history, reason, error)


def _run_trial(
    run_one: Callable[..., Any],
    given: Mapping[str, Any],
    place: str | None,
    function: str | None,
) -> Trial:
    result = run_one(**given, storage_path=place)
    if not isinstance(result, TrainingResult):
        raise errors.ValueMismatchError(
            "Expected `run_one` to return the result of `learning.run`, a"
            f" `TrainingResult`, found {errors.describe(result)}."
        )
    if place is not None and result.reason != "interrupted":
        if result.history and not Versions(place, "round_").find():
            raise errors.ConfigError(
                f"Expected `run_one` to save its run in `{place}`, found no round"
                " there: pass the `storage_path` that it takes to `learning.run`."
            )
        noted = {"reason": result.reason, "function": function, "values": dict(given)}
        Versions(place, _FINISHED).write(0, noted)
    return _make_trial(given, result.history, result.reason)


def _find_finished(
    place: str, given: Mapping[str, Any], function: str | None
) -> Trial | None:
    noted, _ = Versions(place, _FINISHED).read_latest()
    if noted is None or function is None or noted["function"] != function:
        return None
    if noted["values"] != given:  # 0.5 and "0.5" have one folder
        return None
    is_empty = not Versions(place, "round_").find()
    history = History() if is_empty else History.load(place)
    return _make_trial(given, history, noted["reason"])


# Arguments.


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise errors.ConfigError(
            f"Expected a list of values as `{name}`, found {errors.describe(values)}:"
            " put a single value in a list."
        )
    listed: list[Any] = list(cast("Iterable[Any]", values))
    if not listed:
        raise errors.ConfigError(f"Expected values of `{name}`, found an empty list.")
    return listed


def _check_values(name: str, values: Sequence[Any]) -> None:
    """Raise ConfigError if a value comes twice. 1 and 1.0 are the same value."""
    for index, value in enumerate(values):
        for other in values[:index]:
            if value == other or _to_text(value) == _to_text(other):
                raise errors.ConfigError(
                    f"Expected each value of `{name}` once, found"
                    f" {errors.describe(other)} and {errors.describe(value)}: two"
                    " trials would be equal."
                )


def _read_parameters(parameters: Any) -> dict[str, list[Value]]:
    if not isinstance(parameters, Mapping):
        raise errors.ConfigError(
            "Expected a mapping from names to lists of values as `parameters`, such as"
            f' {{"rate": [0.1, 0.3]}}, found {errors.describe(parameters)}.'
        )
    read: dict[str, list[Value]] = {}
    for name, values in cast("Mapping[Any, Any]", parameters).items():
        if not isinstance(name, str) or name in (*_COLUMNS, "storage_path"):
            raise errors.ConfigError(
                "Expected names of parameters other than"
                f" {', '.join((*_COLUMNS, 'storage_path'))}, found"
                f" {errors.describe(name)}: pass seeds as `seeds`, and give other"
                " parameters other names."
            )
        read[name] = [_read_value(name, each) for each in _listed(name, values)]
        _check_values(name, read[name])
    return read


def _read_value(name: str, value: Any) -> Value:
    plain = value.item() if isinstance(value, np.generic) else value
    if type(plain) not in _PLAIN:
        raise errors.ConfigError(
            f"Expected numbers, text, booleans or None as values of `{name}`, found"
            f" {errors.describe(value)}: pass a name or a number, and make the object"
            " in `run_one`."
        )
    return plain


def _check_function(run_one: Any, names: Iterable[str]) -> None:
    wanted = [*names, "seed", "storage_path"]
    shown = ", ".join(f"`{name}`" for name in wanted)
    if not callable(run_one):
        raise errors.ConfigError(
            f"Expected a function of {shown} as `run_one`, found"
            f" {errors.describe(run_one)}."
        )
    signature = inspect.signature(run_one)
    try:
        signature.bind(**dict.fromkeys(wanted))
    except TypeError as error:
        raise errors.ConfigError(
            f"Expected a function that is called with {shown} by name as `run_one`,"
            f" found one of `{signature}` ({error}): name its arguments as in"
            " `parameters`."
        ) from error


# Storage.


def _to_text(value: Value) -> str:
    return value if isinstance(value, str) else repr(value)


def _describe_values(values: Mapping[str, Value]) -> str:
    return ", ".join(f"{name}={_to_text(value)}" for name, value in values.items())


def _place_of(root: str, values: Mapping[str, Value]) -> str:
    """Return the folder of a trial. The order of the parameters does not matter."""
    order = sorted(values, key=lambda name: (name == "seed", name))
    parts = (
        "=".join(urllib.parse.quote(t, safe="+") for t in (n, _to_text(values[n])))
        for n in order
    )
    return f"{root.rstrip('/')}/{','.join(parts)}"


def _open_storage(root: str, names: list[str]) -> None:
    """Save or check the names of a sweep's parameters, or raise ConfigError."""
    sweeps = Versions(root, _SWEEP)
    noted, _ = sweeps.read_latest()
    if noted is None:
        if Versions(root, "run_").find():
            raise errors.ConfigError(
                f"Expected a folder for a sweep in `{root}`, found a run of"
                " `learning.run`: pass another `storage_path`."
            )
        sweeps.write(0, {"parameters": names})
    elif sorted(noted["parameters"]) != sorted(names):
        raise errors.ConfigError(
            f"Expected to resume the sweep over {noted['parameters']} in `{root}`,"
            f" found the parameters {names}: pass another `storage_path`."
        )


_LIBRARIES = {"keras", "ray_fed", "tensorflow"}
"""Libraries whose objects have texts that do not describe them, such as models."""


def _identify(run_one: Any) -> str | None:
    """Return a digest of the code and settings that decide a trial.

    It covers the function's code, values that it uses, functions of its module, and
    settings of the context. It is None for anything but a plain function, and if the
    function uses an object whose text does not describe it.
    """
    if not inspect.isfunction(run_one):
        return None
    unknown: list[str] = []
    seen: dict[Any, Any] = {}
    waiting: list[Any] = [run_one]
    for function in waiting:  # the list grows in the loop
        if function in seen:
            continue
        used = {**find_globals(function), **inspect.getclosurevars(function).nonlocals}
        own = [v for v in used.values() if inspect.isfunction(v)]
        waiting += [v for v in own if v.__module__ == run_one.__module__]
        values = {
            name: describe_value(value, unknown.append)
            for name, value in used.items()
            if not isinstance(value, types.ModuleType | types.FunctionType)
        }
        kinds = [type(value) for value in used.values()]
        libraries = [k.__module__.partition(".")[0] for k in kinds if k != ClientData]
        unknown += {*libraries} & _LIBRARIES
        defaults = function.__defaults__, function.__kwdefaults__
        seen[function] = describe_value((function.__code__, defaults)), values
    described = [*seen.values(), describe_settings()]
    return None if unknown else digest(repr(described).encode())


# The beginning of a trial.


@contextlib.contextmanager
def _beginning_alike() -> Generator[Callable[[int], None]]:
    """Yield a function of a seed that makes Keras and the context ready for a trial.

    At the end of the block, Keras and the context continue with their former counts.
    """
    uids: Any = "object_name_uids"
    state: Any = global_state
    counts = dict(state.get_global_attribute(uids, {}))
    context = find_context()
    number = 0 if context is None else context.num_calls

    def count_names_anew() -> None:
        names = collections.defaultdict[str, int](int, counts)
        state.set_global_attribute(uids, names)

    def begin(seed: int) -> None:
        count_names_anew()
        keras.utils.set_random_seed(seed)
        if context is not None and context.is_open:
            context.resume_at(seed % _SEEDS_APART * _CALLS_A_SEED)

    try:
        yield begin
    finally:
        count_names_anew()
        if context is not None and context.is_open:
            context.resume_at(number)
