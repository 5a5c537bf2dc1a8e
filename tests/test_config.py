"""Settings: short forms, sources and their order, and what is refused."""

import pathlib
import pickle
from typing import Any

import pydantic
import pytest
import yaml

from ray_fed import Config, Retry, Subrounds, Workers, errors


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


@pytest.mark.parametrize(
    ("short", "full"),
    [
        pytest.param(
            Config(workers=2),
            Config(workers=Workers(count=2)),
            id="workers",
        ),
        pytest.param(
            Config(subrounds=8),
            Config(subrounds=Subrounds(count=8)),
            id="subrounds",
        ),
    ],
)
def test_count_is_the_short_form(short: Config, full: Config) -> None:
    assert short == full


def test_levels_may_be_given_as_mappings() -> None:
    config = Config(workers={"count": 2, "num_cpus": 0.5}, retry={"crash": 0})

    assert config.workers == Workers(count=2, num_cpus=0.5)
    assert config.retry == Retry(crash=0)


def test_equal_settings_are_equal() -> None:
    assert Config(backend="local", retry=Retry(crash=1)) == Config(
        backend="local", retry=Retry(crash=1)
    )


def test_different_settings_differ() -> None:
    assert Config() != Config(backend="local")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"worker": 2}, "did you mean `workers`?", id="upper level"),
        pytest.param(
            {"workers": {"cuont": 2}}, "did you mean `workers.count`?", id="lower level"
        ),
        pytest.param(
            {"retry": {"memroy": 2}},
            "did you mean `retry.memory`?",
            id="another lower level",
        ),
        pytest.param(
            {"subrounds": {"timeout": 2}},
            "did you mean `subrounds.timeout_s`?",
            id="unit left out",
        ),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        Config(**settings)

    assert str(caught.value).startswith("Expected one of the settings [")
    assert str(caught.value).endswith(message)


def test_unknown_key_names_its_path_and_the_legal_ones() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        Config(retry={"zzz": 2})

    assert str(caught.value) == (
        "Expected one of the settings ['crash', 'hang', 'memory', 'preemption'], found"
        " `retry.zzz`."
    )


@pytest.mark.parametrize("cls", [Workers, Retry, Subrounds])
def test_unknown_key_of_a_part_is_refused_on_its_own(
    cls: type[pydantic.BaseModel],
) -> None:
    with pytest.raises(errors.ConfigError, match="Expected one of the settings"):
        cls(zzz=1)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        pytest.param({"workers": 0}, "workers.count", id="no workers"),
        pytest.param({"workers": (0, 2)}, "workers.count", id="range from none"),
        pytest.param({"workers": (3, 2)}, "workers.count", id="range upside down"),
        pytest.param({"workers": (1, 2, 3)}, "workers.count", id="range of three"),
        pytest.param({"workers": {"count": True}}, "workers.count", id="bool"),
        pytest.param({"workers": True}, "workers", id="bool for workers"),
        pytest.param({"workers": None}, "workers", id="nothing for workers"),
        pytest.param({"workers": "two"}, "workers.count", id="word for workers"),
        pytest.param({"workers": {"num_cpus": 0}}, "workers.num_cpus", id="no CPU"),
        pytest.param(
            {"workers": {"num_gpus": -1}}, "workers.num_gpus", id="negative GPUs"
        ),
        pytest.param({"subrounds": 0}, "subrounds.count", id="no subrounds"),
        pytest.param(
            {"subrounds": {"timeout_s": 0}}, "subrounds.timeout_s", id="no time"
        ),
        pytest.param({"backend": "spark"}, "backend", id="unknown backend"),
        pytest.param({"clients_per_leaf": 0}, "clients_per_leaf", id="empty leaf"),
        pytest.param(
            {"default_num_clients": -1}, "default_num_clients", id="negative cohort"
        ),
        pytest.param({"retry": {"crash": -1}}, "retry.crash", id="negative budget"),
    ],
)
def test_value_out_of_range_is_refused_by_name(
    settings: dict[str, Any], name: str
) -> None:
    with pytest.raises(errors.ConfigError, match=rf"Expected a legal `{name}`"):
        Config(**settings)


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        Config(worker=1, backend="spark")

    assert "`workers`" in str(caught.value)
    assert "`backend`" in str(caught.value)


def test_config_is_frozen() -> None:
    config = Config()

    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.backend = "local"


def test_config_pickles() -> None:
    config = Config(backend="local", retry=Retry(crash=1))

    assert pickle.loads(pickle.dumps(config)) == config


def test_load_of_nothing_is_the_defaults() -> None:
    assert Config.load() == Config()


def test_load_reads_yaml(tmp_path: pathlib.Path) -> None:
    path = _write(tmp_path, "backend: local\nworkers: 3\nretry: {crash: 7}\n")

    assert Config.load(path) == Config(
        backend="local", workers=Workers(count=3), retry=Retry(crash=7)
    )


def test_load_takes_a_path_as_text(tmp_path: pathlib.Path) -> None:
    assert Config.load(str(_write(tmp_path, "backend: local"))).backend == "local"


def test_empty_yaml_is_the_defaults(tmp_path: pathlib.Path) -> None:
    assert Config.load(_write(tmp_path, "# nothing yet\n")) == Config()


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        pytest.param("RAY_FED_BACKEND", "local", Config(backend="local"), id="word"),
        pytest.param(
            "RAY_FED_WORKERS", "4", Config(workers=Workers(count=4)), id="short form"
        ),
        pytest.param(
            "RAY_FED_WORKERS",
            "[2, 4]",
            Config(workers=Workers(count=(2, 4))),
            id="range",
        ),
        pytest.param(
            "RAY_FED_RETRY__CRASH", "5", Config(retry=Retry(crash=5)), id="lower level"
        ),
        pytest.param(
            "RAY_FED_WORKERS__RESOURCES",
            "{big: 1.5}",
            Config(workers=Workers(resources={"big": 1.5})),
            id="YAML",
        ),
        pytest.param("RAY_FED_CLIENTS_PER_LEAF", "null", Config(), id="null"),
        pytest.param("RAY_OTHER", "1", Config(), id="not ours"),
    ],
)
def test_load_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, expected: Config
) -> None:
    monkeypatch.setenv(variable, text)

    assert Config.load() == expected


def test_unknown_variable_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_FED_RETRY__CRAHS", "5")

    with pytest.raises(errors.ConfigError, match=r"did you mean `retry\.crash`"):
        Config.load()


def test_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_FED_BACKEND", "local")

    assert Config().backend == "ray"


def test_later_sources_win(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    path = _write(tmp_path, "retry: {crash: 1, memory: 1, preemption: 1}\n")
    monkeypatch.setenv("RAY_FED_RETRY__MEMORY", "2")
    monkeypatch.setenv("RAY_FED_RETRY__PREEMPTION", "2")

    config = Config.load(path, retry={"preemption": 3})

    assert config.retry == Retry(crash=1, memory=2, preemption=3)


def test_arguments_win_over_everything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("RAY_FED_BACKEND", "ray")

    config = Config.load(_write(tmp_path, "backend: ray"), backend="local")

    assert config.backend == "local"


def test_count_from_a_later_source_keeps_the_rest(tmp_path: pathlib.Path) -> None:
    path = _write(tmp_path, "workers: {count: 2, num_cpus: 0.5}\n")

    assert Config.load(path, workers=4).workers == Workers(count=4, num_cpus=0.5)


def test_count_from_an_earlier_source_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("RAY_FED_WORKERS__NUM_CPUS", "0.5")

    config = Config.load(_write(tmp_path, "workers: 4\n"))

    assert config.workers == Workers(count=4, num_cpus=0.5)


def test_count_and_another_setting_may_both_be_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_FED_WORKERS", "4")
    monkeypatch.setenv("RAY_FED_WORKERS__NUM_CPUS", "0.5")

    assert Config.load().workers == Workers(count=4, num_cpus=0.5)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("workers: [", id="no YAML"),
        pytest.param("- workers", id="list"),
        pytest.param("3", id="number"),
        pytest.param("1: 2", id="key that is no word"),
        pytest.param("workers: {1: 2}", id="lower key that is no word"),
        pytest.param("!!python/object/apply:os.getcwd []", id="Python object"),
    ],
)
def test_file_that_holds_no_settings_is_refused(
    tmp_path: pathlib.Path, text: str
) -> None:
    with pytest.raises(errors.ConfigError, match="Expected"):
        Config.load(_write(tmp_path, text))


def test_file_that_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "missing.yaml"

    with pytest.raises(errors.ConfigError, match=r"missing\.yaml"):
        Config.load(path)


def test_variable_that_is_no_yaml_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_FED_WORKERS", "[")

    with pytest.raises(errors.ConfigError, match="RAY_FED_WORKERS"):
        Config.load()


def test_range_of_workers_is_a_short_form() -> None:
    assert Config(workers=(2, 4)) == Config(workers=Workers(count=(2, 4)))


def test_range_of_workers_says_what_it_may_be() -> None:
    with pytest.raises(errors.ConfigError, match=r"\(min, max\) with 1 <= min <= max"):
        Config(workers=(3, 2))


def test_word_for_workers_says_what_it_may_be() -> None:
    with pytest.raises(errors.ConfigError, match=r"found `'four'`: .* a count >= 1"):
        Config(workers="four")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        pytest.param("RAY_FED_WORKERS", "zwei", id="short form"),
        pytest.param("RAY_FED_WORKERS__COUNT", "-1", id="full form"),
        pytest.param("RAY_FED_BACKEND", "spark", id="upper level"),
    ],
)
def test_value_out_of_range_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)

    with pytest.raises(errors.ConfigError) as caught:
        Config.load()

    assert str(caught.value).endswith(f" Set by: {variable}.")


def test_argument_out_of_range_names_no_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_FED_WORKERS", "2")

    with pytest.raises(errors.ConfigError) as caught:
        Config.load(workers="zwei")

    assert "RAY_FED" not in str(caught.value)


@pytest.mark.parametrize("word", ["on", "off", "auto", "'on'"])
def test_jit_takes_bare_words_of_yaml(tmp_path: pathlib.Path, word: str) -> None:
    config = Config.load(_write(tmp_path, f"kernels: {{jit: {word}}}"))

    assert config.kernels.jit == word.strip("'")


def test_range_of_workers_is_read_back_from_yaml(tmp_path: pathlib.Path) -> None:
    settings = Config(workers=(2, 4)).model_dump(mode="json")
    path = _write(tmp_path, yaml.safe_dump(settings))

    assert Config.load(path).workers.count == (2, 4)
