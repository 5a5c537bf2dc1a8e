"""What users hand in: checked once, where it comes in."""

import ray_fed.errors as errors


def expect_object(value: object, cls: type, example: str) -> None:
    """Raise unless a value is an object of a class of Keras.

    Keras takes names and functions in many places; a name says too little here.

    Args:
        value: what the user gave.
        cls: that it must be of.
        example: of what to pass instead.

    Raises:
        ValueMismatchError: it is something else.
    """
    if not isinstance(value, cls):
        raise errors.ValueMismatchError(
            f"Expected a Keras {cls.__name__}, found `{value!r}` of Python type"
            f" `{type(value).__name__}`: pass an object, such as {example}."
        )


def check_epochs(epochs: int) -> int:
    """Return a number of passes over data.

    Raises:
        ConfigError: it is below 1.
    """
    if epochs < 1:
        raise errors.ConfigError(f"Expected `epochs` to be at least 1, found {epochs}.")
    return epochs
