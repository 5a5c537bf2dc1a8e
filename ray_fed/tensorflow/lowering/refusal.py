"""Why a computation is not lowered."""


class CannotLower(Exception):  # noqa: N818 (says what is so; never leaves the package)
    """The computation runs as it was written.

    Args:
        reason: a few words: an op, or what about it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
