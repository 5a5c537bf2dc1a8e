"""The command line: `ray-fed demo`, `doctor`, `status`, `runs` and `config check`.

Slow packages are imported by the commands that need them, so that help comes at once.
An error of ray_fed is shown as one line on standard error. The exit code is then 2.
"""

import json
import pathlib
import platform
import sys
import time
import types
from enum import StrEnum
from typing import Annotated, Any

import typer

import ray_fed.errors as errors

USER_ERROR = 2
INTERRUPTED = 130

_PACKAGES = ("ray-fed", "federated-language", "ray", "keras", "numpy")

app = typer.Typer(
    name="ray-fed",
    help="Federated computations on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")

Address = Annotated[
    str | None,
    typer.Option(help='A Ray to join: "auto", host:port, or ray://host:10001.'),
]


class Backend(StrEnum):
    """Where client work runs."""

    RAY = "ray"
    LOCAL = "local"


def _print_version(wanted: bool) -> None:  # noqa: FBT001 (typer calls it so)
    if wanted:
        import ray_fed

        print(f"ray-fed {ray_fed.__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Federated computations on Ray."""


@app.command()
def demo(
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of federated averaging.")
    ] = 30,
    clients: Annotated[
        int,
        typer.Option(
            min=1, max=1437, help="Clients; two in three take part in a round."
        ),
    ] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random numbers.")] = 0,
    backend: Annotated[
        Backend, typer.Option(help="Ray, or threads of this process.")
    ] = Backend.RAY,
    address: Address = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Actors that train. Default: one per CPU.")
    ] = None,
    subrounds: Annotated[
        int | None,
        typer.Option(min=1, help="Parts of a round. Default: one per worker."),
    ] = None,
    storage_path: Annotated[
        str | None,
        typer.Option(help="Save the run in this folder or URI, and resume it there."),
    ] = None,
    plot: Annotated[
        pathlib.Path | None, typer.Option(help="Write the curve to this PNG file.")
    ] = None,
    save: Annotated[
        pathlib.Path | None, typer.Option(help="Write the model to this .keras file.")
    ] = None,
    as_json: Annotated[  # noqa: FBT002 (typer calls by name)
        bool, typer.Option("--json", help="End with one JSON object.")
    ] = False,
) -> None:
    """Train on handwritten digits that are split among clients.

    Starts a Ray of its own, unless an address is given, and stops it at the end.
    """
    import ray_fed
    from ray_fed.config import Config
    from ray_fed.imports import import_extra
    from ray_fed.observability.progress import WaitLine

    started = time.monotonic()
    _check_outputs(plot, save)
    import_extra("sklearn", "ray-fed demo")
    if plot is not None:
        import_extra("matplotlib", "--plot")
    counts: dict[str, Any] = {"workers": workers, "subrounds": subrounds}
    given = {name: count for name, count in counts.items() if count is not None}
    config = Config.load(backend=backend.value, seed=seed, **given)
    address = address or ("local" if backend is Backend.RAY else None)
    try:
        with ray_fed.init(address, config=config):
            with WaitLine.create(config.progress) as waiting:
                waiting.say("importing TensorFlow")
                from ray_fed.demo import train
            result, model = train(rounds, clients, seed, storage_path)
    except KeyboardInterrupt:
        print("ray-fed: interrupted, all that was started is stopped", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    history = result.history
    if plot is not None:
        names = "evaluation.accuracy", "evaluation.loss"
        history.plot(*names).savefig(plot, dpi=150)
    if save is not None:
        model.save(save)
    warm = history[1:] or history  # the first round waits for the workers
    last: Any = history[-1].evaluation
    report = {
        "accuracy": float(last["accuracy"]),
        "loss": float(last["loss"]),
        "rounds": len(history),
        "clients_per_second": sum(len(record.clients) for record in warm)
        / sum(record.seconds for record in warm),
        "retries": sum(record.retries for record in history),
        "seconds": time.monotonic() - started,
    }
    if as_json:
        print(json.dumps(report))
        return
    print(
        "test accuracy {accuracy:.4f}, loss {loss:.4f} after {rounds} rounds; {retries}"
        " retries, {seconds:.1f} s with start and evaluation, {clients_per_second:.0f}"
        " clients/s once warm".format_map(report)
    )


def _check_outputs(plot: pathlib.Path | None, save: pathlib.Path | None) -> None:
    for path in filter(None, [plot, save]):
        if not path.absolute().parent.is_dir():
            raise errors.UserError(
                f"Expected a file in a folder that exists, found `{path}`."
            )
    if save is not None and save.suffix != ".keras":
        raise errors.UserError(
            f"Expected a name that ends with .keras, found `{save}`."
        )


@app.command()
def doctor(address: Address = None) -> None:
    """Print versions, devices, and whether there is a Ray to join."""
    _print_fact("python", platform.python_version())
    _print_fact("system", platform.platform())
    for package in _PACKAGES:
        _print_fact(package, _version_of(package))
    _print_tensorflow()
    _print_fact("Ray", _describe_ray(address))


@app.command()
def status(address: Address = None) -> None:
    """Print the nodes of a running Ray and their resources."""
    from ray_fed.cluster.inventory import read_inventory

    inventory = read_inventory(address)
    for node, amounts in inventory.nodes:
        _print_fact(node, str(amounts))
    _print_fact("all", str(inventory.total))
    _print_fact("free", str(inventory.free))


@app.command()
def runs(
    path: Annotated[
        str, typer.Argument(help="A storage_path, or a folder of these; or a URI.")
    ],
) -> None:
    """List the runs that are saved at a place: rounds, metrics, size."""
    from ray_fed.learning.checkpoints import list_runs

    for place, facts in list_runs(path).items():
        _print_fact(place, facts)


@config_app.command()
def check(path: Annotated[pathlib.Path, typer.Argument(help="A YAML file.")]) -> None:
    """Read settings as ray_fed.init does, and print them all."""
    import yaml

    from ray_fed.config import Config

    settings = Config.load(path).model_dump(mode="json")
    print(yaml.safe_dump(settings, sort_keys=False), end="")


def _print_fact(name: str, value: str) -> None:
    print(f"{name:<22} {value}")


def _version_of(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _print_tensorflow() -> None:
    import tensorflow as tf

    _print_fact("tensorflow", tf.__version__)
    _print_fact("bytecode", _describe_bytecode(tf))
    for device in tf.config.list_physical_devices():
        details = tf.config.experimental.get_device_details(device)
        kind = details.get("device_name", device.device_type)
        _print_fact(device.name.removeprefix("/physical_device:"), kind)


def _describe_ray(address: str | None) -> str:
    from ray_fed.cluster import inventory, joining

    try:
        found = joining.find(address)
        if found is None and address is not None:
            raise joining.missing_error(address)
        if found is None:
            return "none to join: `ray_fed.init()` starts one of its own"
        has = inventory.read_joined(found)
    except errors.ClusterError as error:
        return str(error)
    return f"`ray_fed.init()` joins {found}: {len(has.nodes)} nodes, {has.total}"


def _describe_bytecode(package: types.ModuleType) -> str:
    spec = package.__spec__
    if spec is None or spec.cached is None or pathlib.Path(spec.cached).exists():
        return "compiled"
    folder = pathlib.Path(spec.origin or "").parent.parent
    return (
        f"missing: each process compiles {package.__name__} anew, which takes 15 s of"
        f" CPU and more. Run once: `python -m compileall -q {folder}`; uv installs with"
        " it by `uv pip install --compile-bytecode`."
    )


def main() -> None:
    """Run the command line, and end the process."""
    try:
        app()
    except errors.RayFedError as error:
        message = " ".join(str(error).split())
        print(f"ray-fed: {message}", file=sys.stderr)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
