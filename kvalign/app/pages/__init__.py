"""Pages that explain and show the toolkit, from the jinja2 templates in templates/."""

from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvalign.foundation.escape import escape_controls


def render(template: str, **values: object) -> str:
    """Fill in a template. Text from models and users is data, without any effect."""
    return _TEMPLATES.get_template(template).render(values)


def source(name: str) -> Markup:
    """A style sheet or script of templates/, inserted into a page unchanged."""
    folder = resources.files("kvalign.app.pages").joinpath("templates")
    return Markup(folder.joinpath(name).read_text(encoding="utf-8"))


_TEMPLATES = Environment(
    loader=PackageLoader("kvalign.app.pages"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=lambda value: value if isinstance(value, Markup) else escape_controls(value),
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # keys in their own order
