"""A clock that a test sets."""


class Clock:
    """`now_s` is the time that it tells."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
