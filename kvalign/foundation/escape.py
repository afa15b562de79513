"""Text from models and users on pages, plots and terminals: all visible, without effect."""

import re

from kvalign.foundation.errors import UserError

_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS[0x7F] = "\u2421"
_ACTING = re.compile("[\u0080-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def escape_controls(text: object) -> str:
    """Text with every character visible: NUL as its picture, an override as its number."""
    return _ACTING.sub(lambda m: f"[U+{ord(m[0]):04X}]", str(text).translate(_CONTROLS))


def check_text(text: str, what: str = "the text") -> None:
    """Raise UserError for text without a UTF-8 form: half of a character, from JSON's \\ud800 or
    from a file name in another encoding.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise UserError(
            f"{what} is not UTF-8: character {error.start + 1} is U+{half:04X}, half of one"
        ) from None
