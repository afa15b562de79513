"""Errors with a message for the user; any other exception is a bug of KV-Align. And text of models
and users, in messages, on pages and in terminals: all visible, without effect.
"""

import errno
import re

_OF_PATHS = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
_TOO = (errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)


def is_of_a_path(error: BaseException) -> bool:
    """Return whether the error concerns a path: missing, of another kind, not accessible."""
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
    """Stop by Ctrl-C; it says what the next identical call keeps, or the command `to_go_on`."""

    def __init__(self, line: str, to_go_on: str = ""):
        super().__init__(line)
        self.to_go_on = to_go_on


class Killed(KeyboardInterrupt):
    """Stop by `kill`, which asks for no confirmation."""


class RunError(RuntimeError):
    """Work that failed half-way, with the reason; what was finished is kept."""


_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS[0x7F] = "\u2421"
_ACTING = re.compile("[\u0080-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def escape_controls(text: object) -> str:
    """Text with every character visible: NUL as its picture, an override as its number."""
    return _ACTING.sub(lambda m: f"[U+{ord(m[0]):04X}]", str(text).translate(_CONTROLS))


def check_text(text: str, what: str = "the text") -> None:
    """Raise UserError for text without a UTF-8 form: half of a character, as JSON's \\ud800."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise UserError(
            f"{what} is not UTF-8: character {error.start + 1} is U+{half:04X}, half of one"
        ) from None
