"""The errors that say something to a user. Anything else that is raised is a fault of ours."""

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
    """Return whether the error is about a path that the user gave: there is nothing, it is of
    another kind, it is not theirs, its name is too long, a link leads nowhere.
    """
    return isinstance(error, _OF_PATHS) or (isinstance(error, OSError) and error.errno in _TOO)


class UserError(ValueError):
    """Something that the user can mend: what came, what was needed and what to do, in one line."""


class KeywordError(UserError, TypeError):
    """A keyword that a function does not have."""


class NotFoundError(UserError, FileNotFoundError):
    """A file, a folder or a name that does not exist."""


class ExistsError(UserError, FileExistsError):
    """A file or a folder that would be overwritten."""


class Interrupted(KeyboardInterrupt):
    """Stopped by Ctrl-C: the message says what was kept, with which the same call goes on, or the
    command `to_go_on` does.
    """

    def __init__(self, kept: str, to_go_on: str = ""):
        super().__init__(kept)
        self.to_go_on = to_go_on


class Killed(KeyboardInterrupt):
    """Stopped by `kill`, which no one has to be asked about twice."""


class RunError(RuntimeError):
    """Work that failed half-way for a reason that the message gives; what was finished is kept."""
