"""Work in graphs that says that it runs, and waits to be let go."""

import pathlib
from typing import Any

import tensorflow as tf

GO = "go"
"""The file that lets work go on."""


def mark_and_wait(
    x: Any, folder: pathlib.Path, name: Any, *, is_waiting: Any = True
) -> Any:
    """Leave a file, then return a number, once there is the file `GO` beside it.

    Args:
        x: the number, int32[].
        folder: of the files.
        name: what the name of the file begins with; it ends with the time.
        is_waiting: whether to wait at all.
    """
    now = tf.strings.as_string(tf.timestamp(), precision=9)
    path = tf.strings.join([str(folder), "/", name, "-", now])
    with tf.control_dependencies([tf.io.write_file(path, "")]):
        begun = tf.identity(x)

    def waits(_: Any) -> Any:
        # With the time in it: a graph may look for a constant pattern but once.
        pattern = tf.where(tf.timestamp() > 0.0, str(folder / GO), "")
        gone = tf.size(tf.io.matching_files(pattern)) > 0
        return tf.logical_and(is_waiting, ~gone)

    def count(turn: Any) -> Any:
        return [turn + 1]

    turns = tf.while_loop(waits, count, [0 * begun])[0]
    return begun + 0 * turns
