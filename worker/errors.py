"""Errors that end a replica, and the text of an error in one line."""


class DeviceLost(RuntimeError):
    """A device no longer computes, or a rank is gone. The state of this process is lost: end it and start another."""


class RankLost(RuntimeError):
    """A rank of the replica has ended or does not answer, so the other ranks cannot go on. The message names it."""


def one_line(error: BaseException, most: int = 200) -> str:
    """The type and the message of an error in one line; the message is cut to `most` characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"
