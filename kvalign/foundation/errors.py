"""Errors with a message for the user. Any other exception is a bug of KV-Align."""

import errno

_OF_PATHS = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
_TOO = (errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)


def is_of_a_path(error: BaseException) -> bool:
    """Return whether the error concerns a path that the user gave: it does not exist, is of another
    kind, is not accessible, has too long a name, or is a broken link.
    """
    return isinstance(error, _OF_PATHS) or (isinstance(error, OSError) and error.errno in _TOO)


class UserError(ValueError):
    """Error that the user can correct: what came, what was needed and what to do, in one line."""


class KeywordError(UserError, TypeError):
    """Unknown keyword of a function."""


class NotFoundError(UserError, FileNotFoundError):
    """File, folder or name that does not exist."""


class ExistsError(UserError, FileExistsError):
    """File or folder that would be overwritten."""


class Interrupted(KeyboardInterrupt):
    """Stop by Ctrl-C. The message says what was kept for the next identical call, or for the
    command `to_go_on`.
    """

    def __init__(self, line: str, to_go_on: str = ""):
        super().__init__(line)
        self.to_go_on = to_go_on


class Killed(KeyboardInterrupt):
    """Stop by `kill`, which asks for no confirmation."""


class RunError(RuntimeError):
    """Work that failed half-way, with the reason; what was finished is kept."""
