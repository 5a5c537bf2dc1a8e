"""Clients' work that records that it runs, and waits until a test lets it continue."""

import pathlib
from typing import Any

import tensorflow as tf

GO = "go"
"""Name of the file whose existence lets the work continue."""


def mark(x: Any, folder: pathlib.Path, name: Any) -> Any:
    """Return `x` inside a graph, after a file is written that records the run.

    The file is in `folder`. Its name is `name`, followed by the time.
    """
    now = tf.strings.as_string(tf.timestamp(), precision=9)
    path = tf.strings.join([str(folder), "/", name, "-", now])
    with tf.control_dependencies([tf.io.write_file(path, "")]):
        return tf.identity(x)


def count_marks(folder: pathlib.Path, num_clients: int) -> list[int]:
    """Return how often each client ran, from files that `mark` named by the client."""
    found = [int(path.name.split("-")[0]) for path in folder.glob("*-*")]
    return [found.count(client) for client in range(num_clients)]


def mark_and_wait(
    x: Any, folder: pathlib.Path, name: Any, *, is_waiting: Any = True
) -> Any:
    """Call `mark`, and return `x` (int32[]) once `folder` has a file `GO`.

    If `is_waiting` is false, return at once.
    """
    begun = mark(x, folder, name)

    def waits(_: Any) -> Any:
        # The pattern depends on the time, because a graph may evaluate a constant
        # pattern only once.
        pattern = tf.where(tf.timestamp() > 0.0, str(folder / GO), "")
        gone = tf.size(tf.io.matching_files(pattern)) > 0
        return tf.logical_and(is_waiting, ~gone)

    def count(turn: Any) -> Any:
        return [turn + 1]

    turns = tf.while_loop(waits, count, [0 * begun])[0]
    return begun + 0 * turns
