"""Settings: short forms, sources and their order, and what is refused."""

import copy
import math
import os
import pathlib
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import pydantic
import pytest
import yaml

from ray_fed import Config, Retry, Subrounds, Workers, create_context, errors
from ray_fed.config import resolve_config


def _write(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "ray_fed.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_ask_for_ray_and_nothing_else() -> None:
    config = Config()

    assert config.backend == "ray"
    assert config.workers.count is None
    assert config.subrounds.count is None
    assert config.clients_per_leaf is None
    assert config.default_num_clients == 0
    assert config.runtime_env is None


def test_count_is_the_short_form() -> None:
    assert Config(workers=2) == Config(workers=Workers(count=2))
    assert Config(workers=(2, 4)) == Config(workers=Workers(count=(2, 4)))
    assert Config(subrounds=8) == Config(subrounds=Subrounds(count=8))


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"worker": 2}, "workers"),
        ({"workers": {"cuont": 2}}, "workers.count"),
        ({"retry": {"memroy": 2}}, "retry.memory"),
        ({"subrounds": {"timeout": 2}}, "subrounds.timeout_s"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(
    settings: dict[str, Any], nearest: str
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        Config(**settings)

    assert str(caught.value).startswith("Expected one of the settings [")
    assert str(caught.value).endswith(f"did you mean `{nearest}`?")


def test_unknown_key_names_its_path_and_the_legal_ones() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        Config(retry={"zzz": 2})

    assert str(caught.value) == (
        "Expected one of the settings ['crash', 'hang', 'memory', 'preemption'], found"
        " `retry.zzz`."
    )


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        *(
            ({"workers": ends}, "workers.count")
            for ends in [
                (0, 2), (3, 2), (1, 2, 3), "two", {"count": True}, (1, math.nan),
                (1, 2**63), (-math.inf, 2), (1, True), ("1", "2"), (1.0, 2),
            ]
        ),
        ({"workers": True}, "workers"),
        ({"workers": None}, "workers"),
        ({"backend": "spark"}, "backend"),
    ],
    ids=str,
)  # fmt: skip
def test_value_out_of_range_is_refused_by_name(
    settings: dict[str, Any], name: str
) -> None:
    with pytest.raises(errors.ConfigError, match=rf"Expected a legal `{name}`"):
        Config(**settings)


WHOLE = {
    "workers.count": (1, 2**16),
    "workers.client_bytes": (0, 2**63 - 1),
    "workers.memory": (0, 2**48),
    "subrounds.count": (1, 2**31 - 1),
    "retry.crash": (0, 10**6),
    "retry.preemption": (0, 10**6),
    "retry.memory": (0, 10**6),
    "retry.hang": (0, 10**6),
    "kernels.vectorized_clients": (1, 2**31 - 1),
    "clients_per_leaf": (1, 2**31 - 1),
    "default_num_clients": (0, 2**31 - 1),
    "max_dropped_clients": (0, 2**31 - 1),
    "kept_bytes": (0, 2**63 - 1),
    "data.sequence_bytes": (1, 2**63 - 1),
    "seed": (1 - 2**128, 2**128 - 1),
}
"""Settings that are whole numbers: the least and the greatest."""

REAL = {
    "workers.num_cpus": (1e-4, 2**31),
    "workers.num_gpus": (0, 1),
    "workers.resources.tpu": (0, 2**31),
    "workers.start_timeout_s": (1e-3, 10**9),
    "workers.wait_timeout_s": (1e-3, 10**9),
    "subrounds.timeout_s": (1e-3, 10**9),
    "stragglers.factor": (1.01, 10**9),
    "stragglers.min_s": (1e-3, 10**9),
    "kernels.call_s": (1e-3, 10**9),
}
"""Settings that are numbers of any kind: one of the least and one of the greatest."""

NO_NUMBERS = [math.nan, True, np.True_, "", "two", "nan", "0x10", 1j, b"1", [1], {}]
OUT_OF_ALL_RANGES = [math.inf, -math.inf, -(2**128), 10**400, "inf"]
NO_WHOLE_NUMBERS = [1.5, 2.0, "2", np.float64(2)]


def _setting(path: str, value: object) -> dict[str, Any]:
    """Return a tree of settings with a value at a path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return cast("dict[str, Any]", value)


def _value_at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def _settings_of(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all settings whose schema allows numbers."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        part = field.annotation
        if isinstance(part, type) and issubclass(part, pydantic.BaseModel):
            yield from _settings_of(part, f"{name}.")
        elif {"integer", "number"} & set(_words(schema["properties"][name])):
            yield prefix + name


def _words(tree: object) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for member in cast("Any", tree.values() if isinstance(tree, dict) else tree):
            yield from _words(member)


def test_tables_have_every_setting_that_is_a_number() -> None:
    found = {name.removesuffix(".tpu") for name in [*WHOLE, *REAL]}

    assert found == set(_settings_of(Config))


@pytest.mark.parametrize("name", [*WHOLE, *REAL])
def test_numbers_of_a_range_are_taken_as_they_are_and_no_others(name: str) -> None:
    least, greatest = (WHOLE | REAL)[name]
    numbers = [least, greatest, 2, np.int64(2), np.uint8(3)]
    wrong: list[object] = [*NO_NUMBERS, *OUT_OF_ALL_RANGES, greatest * 1.1]
    if name in WHOLE:
        wrong += [*NO_WHOLE_NUMBERS, least - 1, greatest + 1]
    else:
        wrong += [least - 1, -1e-5]
        numbers += [1.5, np.float32(1.5)]

    for value in wrong:
        with pytest.raises(errors.ConfigError, match=f"`{name}`"):
            Config(**_setting(name, value))
    for number in (number for number in numbers if number <= greatest):
        found = _value_at(Config(**_setting(name, number)), name)
        assert found == number
        assert type(found) is (int if name in WHOLE else float)


def test_less_than_ray_gives_is_refused() -> None:
    told = r"0\.0001, the least that Ray gives"
    for name in ("num_cpus", "num_gpus", "resources.tpu"):
        with pytest.raises(errors.ConfigError, match=told):
            Config(**_setting(f"workers.{name}", 1e-5))


def test_more_than_one_gpu_for_a_worker_is_refused_with_the_reason() -> None:
    for num_gpus in (1.5, 8):
        with pytest.raises(errors.ConfigError, match="executor works on one device"):
            Config(workers={"num_gpus": num_gpus})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CPU", r"workers\.num_cpus"),
        ("GPU", r"workers\.num_gpus"),
        ("num_cpus", r"workers\.num_cpus"),
        ("num_gpus", r"workers\.num_gpus"),
        ("memory", r"workers\.memory"),
        ("", "can be printed"),
        ("\0", "can be printed"),
        ("\ud800", "can be printed"),
    ],
    ids=ascii,
)
def test_resources_that_ray_takes_elsewhere_are_refused(
    name: str, message: str
) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        Workers(resources={name: 1})


@pytest.mark.parametrize(
    "selector",
    [
        {"zone": ""},
        {"zone": "-a"},
        {"zone": "a b"},
        {"zone": "in()"},
        {"zone": "in(a"},
        {"zone": "!!a"},
        {"": "a"},
        {"ray.io/": "a"},
        {"zone!": "a"},
        {"zone": "a" * 64},
    ],
    ids=str,
)
def test_label_selectors_that_ray_refuses_are_refused(selector: dict[str, str]) -> None:
    label_utils: Any = pytest.importorskip("ray._private.label_utils")
    assert label_utils.validate_label_selector(selector) or selector["zone"] == ""

    with pytest.raises(errors.ConfigError, match=r"`workers\.label_selector`"):
        Config(workers={"label_selector": selector})


@pytest.mark.parametrize(
    "term", ["a", "!a", "in(a, b)", "!in(a,b)", "inside", "a.b_c-d", "a" * 63]
)
@pytest.mark.parametrize("key", ["zone", "ray.io/market-type"])
def test_label_selectors_of_ray_are_accepted(key: str, term: str) -> None:
    label_utils: Any = pytest.importorskip("ray._private.label_utils")
    assert label_utils.validate_label_selector({key: term}) is None

    found = Workers(label_selector={key: term}).label_selector
    assert found == {key: term.replace(" ", "")}  # as Ray reads it


def test_accelerator_type_is_printable_text() -> None:
    for name in ("", "\n", 100):
        with pytest.raises(errors.ConfigError, match=r"`workers\.accelerator_type`"):
            Config(workers={"accelerator_type": name})


def test_powers_of_ten_may_be_written_as_yaml_reads_them_for_text(
    tmp_path: pathlib.Path,
) -> None:
    config = Config.load(_write(tmp_path, "subrounds: {timeout_s: 1e3}"))

    assert config.subrounds.timeout_s == 1000


def test_groups_of_workers_are_workers_or_counts(tmp_path: pathlib.Path) -> None:
    groups = {"cpu": 8, "gpu": {"count": (1, 2), "num_gpus": 1}}
    expected = {
        "cpu": Workers(count=8),
        "gpu": Workers(count=(1, 2), num_gpus=1),
    }

    config = Config(workers=2, worker_groups=groups)
    assert config.worker_groups == expected
    with pytest.raises(errors.ConfigError, match="no change of settings"):
        cast("Any", config.worker_groups)["cpu"] = Workers()
    path = _write(tmp_path, yaml.safe_dump({"workers": 2, "worker_groups": groups}))
    assert Config.load(path).worker_groups == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"worker_groups": {"cpu": {"cuont": 8}}}, "mean `worker_groups.cpu.count`"),
        ({"worker_groups": {"cpu": {"count": 0}}}, "legal `worker_groups.cpu.count`"),
        ({"worker_groups": {"cpu": {}}}, "Expected a `worker_groups.cpu.count`"),
        ({"worker_groups": {"": 1}}, "text that can be printed"),
        ({"workers": {}, "worker_groups": {"cpu": 1}}, "Expected a `workers.count`"),
        ({"backend": "local", "worker_groups": {"cpu": 1}}, 'Expected backend="ray"'),
    ],
    ids=str,
)
def test_wrong_groups_of_workers_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        Config(**{"workers": 2, **settings})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_gpus", 1),
        ("memory", 2**30),
        ("accelerator_type", "H100"),
        ("resources", {"tpu": 1}),
        ("label_selector", {"zone": "a"}),
    ],
)
def test_threads_have_no_resources_of_ray(name: str, value: Any) -> None:
    with pytest.raises(errors.ConfigError, match=f"no `workers.{name}`"):
        create_context(Config(backend="local", workers={name: value}))


def test_threads_of_one_process_are_bounded() -> None:
    with pytest.raises(errors.ConfigError, match=r"at most 1024 `workers\.count`"):
        create_context(Config(backend="local", workers=2**16))


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        Config(worker=1, backend="spark")

    assert "`workers`" in str(caught.value)
    assert "`backend`" in str(caught.value)


def test_config_is_frozen() -> None:
    config = Config()

    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.backend = "local"


MAPPINGS: dict[str, Any] = {
    "workers": {"resources": {"big": 1.0}},
    "runtime_env": {"env_vars": {"A": "1"}, "pip": ["x", {"y": [1]}]},
}


@pytest.mark.parametrize(
    "change",
    [
        "config.workers.resources.update(big=2.0)",
        "config.workers.resources['b'] = float('nan')",
        "type(config.workers)().resources.update(big=1.0)",
        "config.runtime_env.pop('pip')",
        "config.runtime_env['env_vars'].clear()",
        "config.runtime_env['pip'].append('z')",
        "config.runtime_env['pip'][1]['y'].extend([2])",
    ],
)
def test_mappings_and_lists_of_a_config_are_frozen(change: str) -> None:
    config = Config(**MAPPINGS)

    with pytest.raises(errors.ConfigError, match="no change of settings"):
        exec(change, {"config": config})

    assert config == Config(**MAPPINGS)


def test_mappings_of_a_config_are_copies() -> None:
    given = {"env_vars": {"A": "1"}}
    config = Config(runtime_env=given)

    given["env_vars"]["A"] = "2"

    assert config.runtime_env == {"env_vars": {"A": "1"}}


@pytest.mark.parametrize("config", [Config(), Config(**MAPPINGS)], ids=["", "mappings"])
def test_equal_configs_have_one_hash(config: Config) -> None:
    found: list[Any] = [
        config,
        Config(**config.model_dump()),
        Config.model_validate_json(config.model_dump_json()),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ]

    assert len(set(found)) == 1


def test_mappings_are_dumped_as_plain_ones() -> None:
    dumped = Config(**MAPPINGS).model_dump()

    assert (
        yaml.safe_load(yaml.safe_dump(dumped["runtime_env"]))
        == (MAPPINGS["runtime_env"])
    )
    assert type(dumped["workers"]["resources"]) is dict


def test_load_reads_yaml(tmp_path: pathlib.Path) -> None:
    path = _write(tmp_path, "backend: local\nworkers: 3\nretry: {crash: 7}\n")

    assert Config.load(path) == Config(
        backend="local", workers=Workers(count=3), retry=Retry(crash=7)
    )


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("RAY_FED_BACKEND", "local", {"backend": "local"}),
        ("RAY_FED_WORKERS", "4", {"workers": 4}),
        ("RAY_FED_WORKERS", "[2, 4]", {"workers": (2, 4)}),
        ("RAY_FED_RETRY__CRASH", "5", {"retry": {"crash": 5}}),
        (
            "RAY_FED_WORKERS__RESOURCES",
            "{big: 1.5}",
            {"workers": {"resources": {"big": 1.5}}},
        ),
        ("RAY_FED_CLIENTS_PER_LEAF", "null", {}),
        ("RAY_OTHER", "1", {}),
    ],
)
def test_load_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, expected: Any
) -> None:
    monkeypatch.setenv(variable, text)

    assert Config.load() == Config(**expected)
    assert resolve_config(None) == Config(**expected)
    assert Config().backend == "ray"  # the constructor reads no variable


def test_variables_set_what_the_config_of_a_context_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_FED_PROGRESS", "on")
    monkeypatch.setenv("RAY_FED_WORKERS", "[2, 4]")
    monkeypatch.setenv("RAY_FED_WORKERS__NUM_CPUS", "0.5")
    monkeypatch.setenv("RAY_FED_SEED", "5")
    config = Config(backend="local", workers=Workers(count=1), seed=7)

    assert resolve_config(config) == Config(
        backend="local",
        workers=Workers(count=1, num_cpus=0.5),
        seed=7,
        progress="on",
    )
    with create_context(config) as context:
        assert context.config.progress == "on"


def test_variable_beside_a_config_is_named_where_it_is_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_FED_PROGRESS", "loud")

    with pytest.raises(errors.ConfigError, match="Set by: RAY_FED_PROGRESS"):
        resolve_config(Config(seed=7))


def test_later_sources_win(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    path = _write(tmp_path, "retry: {crash: 1, memory: 1, preemption: 1}\n")
    monkeypatch.setenv("RAY_FED_RETRY__MEMORY", "2")
    monkeypatch.setenv("RAY_FED_RETRY__PREEMPTION", "2")

    config = Config.load(path, retry={"preemption": 3})

    assert config.retry == Retry(crash=1, memory=2, preemption=3)
    monkeypatch.setenv("RAY_FED_BACKEND", "ray")
    assert Config.load(path, backend="local").backend == "local"


def test_unknown_variable_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_FED_RETRY__CRAHS", "5")

    with pytest.raises(errors.ConfigError, match=r"did you mean `retry\.crash`"):
        Config.load()


def test_count_of_one_source_keeps_the_rest_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    path = _write(tmp_path, "workers: {count: 2, num_cpus: 0.5}\n")
    assert Config.load(path, workers=4).workers == Workers(count=4, num_cpus=0.5)

    monkeypatch.setenv("RAY_FED_WORKERS__NUM_CPUS", "0.5")
    config = Config.load(_write(tmp_path, "workers: 4\n"))
    assert config.workers == Workers(count=4, num_cpus=0.5)


ALIASES = "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else '1'] * 9)}]\n" for i in range(40)
)
"""A list of lists of lists: its whole text would fill any memory."""

NO_YAML = {
    "open": b"workers: [",
    "list": b"- workers",
    "number": b"3",
    "key that is no word": b"1: 2",
    "lower key that is no word": b"workers: {1: 2}",
    "Python object": b"!!python/object/apply:os.getcwd []",
    "no UTF-8": b"seed: \xff",
    "UTF-16": "seed: 1".encode("utf-16"),
    "NUL": b"seed: \0",
    "very deep": b"[" * 20_000,
    "very deep mappings": b"{a: " * 5_000,
    "no such date": b"seed: 2026-13-45",
    "more digits than Python reads": b"seed: " + b"1" * 5_000,
    "aliases": f"{ALIASES}seed: *a39".encode(),
    "aliases as a count": f"{ALIASES}workers: *a39".encode(),
    "too long": b"# " + b"x" * 2**18,
}


@pytest.mark.parametrize("name", NO_YAML)
def test_bytes_that_are_no_settings_are_refused(
    tmp_path: pathlib.Path, name: str
) -> None:
    path = tmp_path / "ray_fed.yaml"
    path.write_bytes(NO_YAML[name])

    with pytest.raises(errors.ConfigError, match="Expected") as caught:
        Config.load(path)

    assert len(str(caught.value)) < 20_000


@pytest.mark.parametrize(
    "text",
    ["[" * 20_000, "2026-13-45", "&a [*a]", "["],
    ids=["very deep", "no such date", "aliases", "open"],
)
def test_variable_that_is_no_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("RAY_FED_SEED", text)

    with pytest.raises(errors.ConfigError, match=r"RAY_FED_SEED|seed"):
        Config.load()


def test_path_that_names_no_file_is_refused(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    for path in ("a\0b", "\ud800", 3, b"a", "", "/dev/zero", "."):
        given: Any = path
        with pytest.raises(errors.ConfigError, match="Expected a YAML file at"):
            Config.load(given)
    for name, told in (("fifo", "a FIFO"), ("missing.yaml", r"missing\.yaml")):
        with pytest.raises(errors.ConfigError, match=told):
            Config.load(tmp_path / name)


def test_wrong_counts_of_workers_say_what_they_may_be() -> None:
    with pytest.raises(errors.ConfigError, match=r"\(min, max\) with 1 <= min <= max"):
        Config(workers=(3, 2))
    with pytest.raises(errors.ConfigError, match=r"found `'four'`: .* a count >= 1"):
        Config(workers="four")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("RAY_FED_WORKERS", "zwei"),
        ("RAY_FED_WORKERS__COUNT", "-1"),
        ("RAY_FED_BACKEND", "spark"),
        ("RAY_FED_SEED__X", "1"),
        ("RAY_FED_WORKERS__RESOURCES", "{a: .nan}"),
        ("RAY_FED_WORKERS__RESOURCES", "{1: 2}"),
        ("RAY_FED_WORKERS__RESOURCES__A", ".nan"),
        ("RAY_FED_WORKERS", "{count: -1}"),
        ("RAY_FED_DATA__PROTOCOLS", "[s3, 1]"),
        ("RAY_FED_WORKRES__COUNT", "1"),
    ],
)
def test_value_out_of_range_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)

    with pytest.raises(errors.ConfigError) as caught:
        Config.load()

    assert str(caught.value).endswith(f" Set by: {variable}.")


def test_only_variables_that_set_it_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("RAY_FED_WORKERS__NUM_CPUS", "2")
    monkeypatch.setenv("RAY_FED_WORKERS__RESOURCES", "{b: 1}")
    monkeypatch.setenv("RAY_FED_DATA__PROTOCOLS", "[s3]")
    path = _write(tmp_path, "workers: {resources: {a: .nan}}")

    with pytest.raises(errors.ConfigError) as caught:
        Config.load(path, data={"protocols": [1]})

    assert "workers.resources.a" in str(caught.value)
    assert "data.protocols" in str(caught.value)
    assert "RAY_FED" not in str(caught.value)


@pytest.mark.parametrize("word", ["on", "off", "auto", "'on'"])
def test_switches_take_bare_words_of_yaml(tmp_path: pathlib.Path, word: str) -> None:
    text = f"kernels: {{jit: {word}}}\nprogress: {word}"
    config = Config.load(_write(tmp_path, text))

    assert config.kernels.jit == word.strip("'")
    assert config.progress == word.strip("'")


def test_range_of_workers_is_read_back_from_yaml(tmp_path: pathlib.Path) -> None:
    settings = Config(workers=(2, 4)).model_dump(mode="json")
    path = _write(tmp_path, yaml.safe_dump(settings))

    assert Config.load(path).workers.count == (2, 4)
