"""Adaptive optimizers at the server: next characters of Shakespeare's speakers.

Source:
    Sashank J. Reddi, Zachary Charles, Manzil Zaheer, Zachary Garrett, Keith Rush, Jakub
    Konečný, Sanjiv Kumar, H. Brendan McMahan: Adaptive Federated Optimization. ICLR
    2021, https://arxiv.org/abs/2003.00295, Algorithm 2. The rates and the order of the
    methods are those of the authors' file `optimization/docs/hyperparameters.md` in
    https://github.com/google-research/federated, task `shakespeare_character`.
"""

import pathlib
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import federated_language as fl
import keras
import numpy as np
from typing_extensions import override

from benchmarks.papers import trials
from ray_fed import learning
from ray_fed.data import ClientData

PAPER = {
    "FedAdagrad": "among the best",
    "FedYogi": "among the best",
    "FedAvgM": "among the best",
    "FedAdam": "",
    "FedAvg": "",
}

LENGTH = 80
CODES = np.full(256, 96, np.int32)
"""The code of each byte: printable ASCII, the end of a line, and one for all others."""
CODES[32:127] = np.arange(95)
CODES[ord("\n")] = 95
NUM_CODES = 97

MOST_WINDOWS, COHORT_SIZE, BATCH_SIZE, NUM_ROUNDS = 64, 10, 4, 100
_HEADING = re.compile(r"(?!ACT|SCENE)([A-Z][A-Za-z' ]{1,30})[.:]")


class Adaptive(keras.optimizers.Optimizer):
    """The server's step of FedAdagrad, FedAdam and FedYogi (Algorithm 2).

    The gradient is the negative mean of the clients' changes. Sums of squares begin at
    zero. There is no correction for the first rounds.

    Args:
        rule: "adagrad", "adam" or "yogi".
        learning_rate: The server's rate, eta.
        tau: The number that is added to the root of the sum of squares.
        beta_1: The share of the last step in a step.
        beta_2: The share of the last sum of squares in a sum ("adam", "yogi").
    """

    def __init__(
        self,
        rule: str,
        learning_rate: float,
        tau: float,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=rule)
        self.rule, self.tau, self.beta_1, self.beta_2 = rule, tau, beta_1, beta_2

    @override
    def build(self, variables: Sequence[Any]) -> None:
        """Make the state of the optimizer."""
        if self.built:
            return
        super().build(variables)
        add = self.add_variable_from_reference
        self.steps: Any = [add(variable, "step") for variable in variables]
        self.squares: Any = [add(variable, "square") for variable in variables]

    @override
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Take one step with one variable."""
        index = self._get_variable_index(variable)
        step, square = self.steps[index], self.squares[index]
        step.assign(self.beta_1 * step + (1 - self.beta_1) * gradient)
        new, rest = gradient * gradient, 1 - self.beta_2
        if self.rule == "adagrad":
            square.assign(square + new)
        elif self.rule == "adam":
            square.assign(self.beta_2 * square + rest * new)
        else:
            square.assign(square - rest * new * keras.ops.sign(square - new))
        root = square**0.5 + self.tau
        variable.assign(variable - learning_rate * step / root)


def build_server_optimizers() -> dict[str, keras.optimizers.Optimizer]:
    """Return the server's optimizer of each method, with the rates of the authors."""
    return {
        "FedAdagrad": Adaptive("adagrad", 10**-0.5, tau=0.1, beta_1=0.0),
        "FedYogi": Adaptive("yogi", 0.01, tau=1e-3),
        "FedAvgM": keras.optimizers.SGD(10**-0.5, momentum=0.9),
        "FedAdam": Adaptive("adam", 0.01, tau=1e-3),
        "FedAvg": keras.optimizers.SGD(1.0),
    }


def read_speakers(text: str) -> dict[str, str]:
    """Return all that each speaker of a play says.

    A speech begins with the name of its speaker on a line of its own, below an empty
    line, with a period or a colon, and ends with the next empty line.
    """
    speeches: defaultdict[str, str] = defaultdict(str)
    for paragraph in re.split(r"\n\s*\n", text.replace("\r", "")):
        first, _, speech = paragraph.strip().partition("\n")
        heading = _HEADING.fullmatch(first.strip())
        if heading is not None and speech:
            speeches[heading[1].upper()] += speech + "\n"
    return dict(speeches)


def load_clients(folder: pathlib.Path | None) -> ClientData:
    """Return windows of the text of each speaker, with the characters that follow.

    Args:
        folder: A folder of plays as text files, `*.txt`.

    Raises:
        FileNotFoundError: There are no speakers.
    """
    windows: dict[str, Any] = {}
    for path in sorted(folder.glob("*.txt")) if folder is not None else ():
        speakers = read_speakers(path.read_text(encoding="utf-8", errors="replace"))
        for speaker, speech in speakers.items():
            code = CODES[np.frombuffer(speech.encode("latin-1", "replace"), np.uint8)]
            count = min((len(code) - 1) // LENGTH, MOST_WINDOWS)
            if count > 1:
                x, y = code[: count * LENGTH], code[1 : count * LENGTH + 1]
                windows[f"{path.stem}: {speaker}"] = [
                    values.reshape(-1, LENGTH) for values in (x, y)
                ]
    if not windows:
        raise FileNotFoundError(
            f"Expected plays as text files, `*.txt`, in `--data`, found `{folder}`"
            " without speeches: a speech begins with a line such as `HAMLET.`"
        )
    return trials.build_clients(
        np.repeat(list(windows), [len(x) for x, _ in windows.values()]),
        np.concatenate([x for x, _ in windows.values()]),
        np.concatenate([y for _, y in windows.values()]),
    )


def build_model(num_units: int = 64) -> learning.Model:
    """Return an LSTM that predicts the character after each one of a window."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((LENGTH,), dtype="int32"),
        keras.layers.Embedding(NUM_CODES, 8),
        keras.layers.LSTM(num_units, return_sequences=True),
        keras.layers.Dense(NUM_CODES),
    ]
    return learning.Model.from_keras(
        keras.Sequential(layers),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        label_type=fl.TensorType(np.int32, [None, LENGTH]),
    )


def reproduce(options: trials.Options) -> list[trials.Row]:
    """Return the test accuracy of each method, at the mean of its last evaluations."""
    train, test = load_clients(options.data).hold_out_rows(0.2, last=True)
    num_rounds = 2 if options.is_quick else NUM_ROUNDS
    rows: list[trials.Row] = []
    for method, optimizer in build_server_optimizers().items():
        if not options.wants(name := f"fed_opt/{method}"):
            continue
        result = options.run(
            name,
            learning.build_fed_avg(build_model(), keras.optimizers.SGD(1.0), optimizer),
            train.shuffle().batch(BATCH_SIZE),
            num_rounds=num_rounds,
            cohort_size=min(COHORT_SIZE, len(train)),
            validation_data=test.batch(64),
            evaluate_every=max(1, num_rounds // 10),
        )
        accuracies = trials.read_accuracies(result.history)
        row = {"method": method, "paper": PAPER[method]}
        row["accuracy"] = f"{100 * np.mean(accuracies[-3:]):.1f} %"
        rows.append(row | trials.describe_speed(result.history))
    return rows
