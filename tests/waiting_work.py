"""Work in graphs that says that it runs, and waits to be let go."""

import pathlib
from typing import Any

import tensorflow as tf

GO = "go"
"""The file that lets work go on."""


def mark(x: Any, folder: pathlib.Path, name: Any) -> Any:
    """Return a value, once a file says that work runs.

    Args:
        x: the value.
        folder: of the file.
        name: what the name of the file begins with; it ends with the time.
    """
    now = tf.strings.as_string(tf.timestamp(), precision=9)
    path = tf.strings.join([str(folder), "/", name, "-", now])
    with tf.control_dependencies([tf.io.write_file(path, "")]):
        return tf.identity(x)


def count_marks(folder: pathlib.Path, num_clients: int) -> list[int]:
    """Return how often each client ran, whose files begin with its number."""
    found = [int(path.name.split("-")[0]) for path in folder.glob("*-*")]
    return [found.count(client) for client in range(num_clients)]


def mark_and_wait(
    x: Any, folder: pathlib.Path, name: Any, *, is_waiting: Any = True
) -> Any:
    """Do what `mark` does with a number, once there is the file `GO` beside its own.

    Args:
        x: the number, int32[].
        folder: of the files.
        name: see `mark`.
        is_waiting: whether to wait at all.
    """
    begun = mark(x, folder, name)

    def waits(_: Any) -> Any:
        # With the time in it: a graph may look for a constant pattern but once.
        pattern = tf.where(tf.timestamp() > 0.0, str(folder / GO), "")
        gone = tf.size(tf.io.matching_files(pattern)) > 0
        return tf.logical_and(is_waiting, ~gone)

    def count(turn: Any) -> Any:
        return [turn + 1]

    turns = tf.while_loop(waits, count, [0 * begun])[0]
    return begun + 0 * turns
