"""Pages that load nothing and run only their own script: documents of templates/, each with a style
sheet and scripts.
"""

import base64
import hashlib
from collections.abc import Iterable
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvalign.foundation.errors import escape_controls

# Text from models and users is data, without any effect.
_TEMPLATES = Environment(
    loader=PackageLoader("kvalign.app"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=lambda value: value if isinstance(value, Markup) else escape_controls(value),
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # keys in their own order


def rendered(name: str, scripts: Iterable[str], **values: Any) -> str:
    """Source of the page of a template, with its style sheet, the colours of all, and scripts."""
    style = Markup("").join(map(_inserted, ("colours.css", f"{name}.css")))
    script = Markup("\n").join(map(_inserted, scripts))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _TEMPLATES.get_template(f"{name}.html")
    return page.render(style=style, script=script, script_hash=f"sha256-{digest}", **values)


def _inserted(name: str) -> Markup:
    """A style sheet or script of templates/, inserted into a page unchanged."""
    folder = resources.files("kvalign.app").joinpath("templates")
    return Markup(folder.joinpath(name).read_text(encoding="utf-8"))
