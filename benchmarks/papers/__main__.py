"""The table of a paper, and ours beside it.

    python -m benchmarks.papers flute --data mnist

Prints a table in Markdown; progress goes to standard error. With `--runs DIR` trials
are saved there, and the same command continues them after it was stopped. Trials have
names such as `fed_avg/iid/0.1/0.05`; `--only iid/0.1` runs those with this text.
"""

import argparse
import pathlib

import ray_fed
from benchmarks.papers import dp_fed_avg, fed_avg, fed_opt, flute, q_ffl, trials

PAPERS = {
    "flute": flute,
    "fed_avg": fed_avg,
    "q_ffl": q_ffl,
    "dp_fed_avg": dp_fed_avg,
    "fed_opt": fed_opt,
}


def main() -> None:
    """Reproduce one paper, and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=PAPERS)
    parser.add_argument("--data", type=pathlib.Path, help="the folder with the data")
    parser.add_argument("--quick", action="store_true", help="a few rounds only")
    parser.add_argument("--only", default="", help="text in the names of trials")
    parser.add_argument("--runs", type=pathlib.Path, help="where trials are saved")
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    options = trials.Options(given.data, given.quick, given.only, given.runs)
    config = ray_fed.Config.load(backend=given.backend, workers=given.workers)
    with ray_fed.init("local" if given.backend == "ray" else None, config=config):
        print(trials.draw_table(PAPERS[given.name].reproduce(options)))


if __name__ == "__main__":
    main()
