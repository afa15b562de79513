"""The site: pages of docs/ and pages that lie elsewhere in the repository, as they stand.

A link of a page leads to a file of the repository, so that it works in a clone. Here it becomes a
link to the page that shows this file, to the picture, or to the reference of the module.

Parts that only the site has:

| line | becomes |
|---|---|
| `<!-- public -->` | a table of what `import kvalign` offers |
| `<!-- commands -->` | every command with its flags |
| `<!-- lanes -->` | the page of a cache at work, in a frame |
"""

import argparse
import functools
import inspect
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import kvalign
from kvalign.app.cli.arguments import add_arguments
from kvalign.app.cli.catalogue import COMMANDS, Command
from kvalign.foundation.settings import Settings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"
# Pages and pictures that lie outside docs/: where they lie, by their place in the site.
ELSEWHERE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
ELSEWHERE |= {f"results/{page.name}": f"eval/results/{page.name}" for page in RESULTS.glob("*.md")}
ELSEWHERE |= {f"images/{one.name}": f"eval/results/{one.name}" for one in RESULTS.glob("*.png")}
LANES = "lanes.html"

_LINK = re.compile(r"\[([^\]]*)\]\(([\w./-]+)(#[\w-]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add what lies elsewhere, and the page of a cache at work."""
    for place, path in ELSEWHERE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    from kvalign.app.commands.lanes import page

    files.append(File.generated(config, LANES, content=page()))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    made: dict[str, Callable[[], str]] = {
        "<!-- public -->": public,
        "<!-- commands -->": commands,
        "<!-- lanes -->": lambda: f'<iframe src="{LANES}" title="A cache at work"></iframe>\n',
    }
    for line, make in made.items():
        if line in markdown.splitlines():
            markdown = markdown.replace(line, make())
    if markdown.startswith("## "):  # a page of its own begins with a heading of the first level
        markdown = re.sub(r"^#(?=#+ )", "", markdown, flags=re.MULTILINE)
    here = ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda match: _link(match, here, page.file.src_uri), markdown)


def _link(match: re.Match[str], here: str, place: str) -> str:
    """Link of a page, which lies at `here` in the repository and has that place in the site."""
    text, target, anchor = match.groups()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    if not (ROOT / path).exists():
        return match[0]  # code
    if module := re.fullmatch(r"(?:kvalign/)?((?:\w+/)*\w+)\.py", path):
        name = module[1].removesuffix("/__init__").replace("/", ".")
        return f"[{text}][kvalign.{name}]"
    places = {path: place for place, path in ELSEWHERE.items()}
    to = places.get(path) or path.removeprefix("docs/")
    if to == path:
        return text  # the site has no such file
    return f"[{text}]({posixpath.relpath(to, posixpath.dirname(place) or '.')}{anchor or ''})"


def public() -> str:
    """Row for each public name: a link to its reference, and the first line of its docstring."""
    rows = ["| `kvalign.` | |", "|---|---|"]
    package = griffe.load(
        "kvalign", search_paths=[ROOT], try_relative_path=False, resolve_aliases=True
    )
    for name in kvalign.__all__:
        found = package[name]
        if found.is_module or name.startswith("_"):
            continue
        found = found.final_target if found.is_alias else found
        about = found.docstring.value.split("\n\n")[0] if found.docstring else ""
        about = " ".join(about.split()).replace("|", "\\|")
        rows.append(f"| [`{name}`][{found.path}] | {about} |")
    return "\n".join(rows) + "\n"


def commands() -> str:
    """Section for each command and kind, in the order of `kvalign --help`."""
    return "\n".join(
        _section(f"{command} {kind}".strip(), settings)
        for command in COMMANDS
        for kind, settings in Command(command).all_settings().items()
    )


def _section(command: str, settings: type[Settings]) -> str:
    about, _, example = inspect.cleandoc(settings.__doc__ or "").partition("Example:")
    width = functools.partial(argparse.HelpFormatter, max_help_position=28, width=100)
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, formatter_class=width, add_help=False)
    add_arguments(parser, settings)
    return (
        f"## `kvalign {command}`\n\n{about.strip()}\n\n```bash\n{example.strip()}\n```\n\n"
        f"```text\n{parser.format_help().strip()}\n```\n"
    )
