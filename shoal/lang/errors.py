"""Errors of programs."""


class ProgramError(RuntimeError):
    """A statement of a program failed. The message names the program's line; the cause is in `__cause__`."""


class NotSupported(ValueError):
    """The backend cannot do what the program asks for."""


class BackendError(RuntimeError):
    """A call to a backend failed. `status` and `code`: the HTTP status, and the endpoint's own name for the error."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
