"""Parts of the pages that are made from the sources at build time, so that they stay up to date.

A line `{{ WORD ARGUMENT }}` of a page becomes:

| line | becomes |
|---|---|
| `{{ source DOTTED.NAME }}` | the source of a function or method |
| `{{ file PATH }}` | a Markdown file of the repository |
| `{{ public }}` | a table of what `import kvalign` offers |
| `{{ commands }}` | every command with its flags |
| `{{ architectures }}` | the table of architectures |
| `{{ lanes }}` | the page of a cache at work, in a frame |

Pictures come from eval/results, which has the only copy.
"""

import re
from functools import lru_cache
from pathlib import Path

import architectures
import command_line
import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import kvalign

ROOT = Path(__file__).parents[2]
PICTURES = (
    "gpt2-mini.png",
    "memory.png",
    "policies-recall-gpt2.png",
    "policies-recall-llama.png",
    "recall-gpt2.png",
    "recall-llama.png",
    "paper-distilgpt2.png",
    "paper-smollm2.png",
    "report.png",
    "sinks.png",
    "smollm2-attention.png",
    "smollm2.png",
    "speed.png",
)
LANES = "lanes.html"

_LINE = re.compile(r"^\{\{ (\w+)(?: (\S+))? \}\}$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pictures and the page of a cache at work."""
    for name in PICTURES:
        picture = ROOT / "eval" / "results" / name
        files.append(File.generated(config, f"images/{name}", abs_src_path=str(picture)))
    from kvalign.app.pages.lanes import page

    files.append(File.generated(config, LANES, content=page()))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    words = {
        "source": source,
        "file": file,
        "public": public,
        "architectures": architectures.table,
        "commands": command_line.reference,
        "lanes": lanes,
    }

    def replace(match: re.Match) -> str:
        word, argument = match.groups()
        return words[word](*([argument] if argument else []))

    return _LINE.sub(replace, markdown)


def file(path: str) -> str:
    """Markdown file of the repository; its links into docs/ become links of the site, its pictures
    the site's.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    text = re.sub(r"\]\((\.\./)*docs/", "](", text)
    return re.sub(r"\]\(([\w-]+\.png)\)", r"](images/\1)", text)


def source(name: str) -> str:
    """Source of `kvalign.module.name` without its docstring, with its file and line above it."""
    found = _package()[name.removeprefix("kvalign.")]
    lines = found.source.splitlines()
    if found.docstring:
        first, end = found.docstring.lineno - found.lineno, found.docstring.endlineno - found.lineno
        del lines[first : end + 1]
    file = Path(found.filepath).resolve().relative_to(ROOT)  # where a link leads
    title = f"{file.as_posix()}, line {found.lineno}"
    return "\n".join([f'```python title="{title}"', *lines, "```"]) + "\n"


def public() -> str:
    """Row for each public name: a link to its reference, and the first line of its docstring."""
    rows = ["| `kvalign.` | |", "|---|---|"]
    for name in kvalign.__all__:
        found = _package()[name]
        if found.is_module:
            continue
        found = found.final_target if found.is_alias else found
        about = found.docstring.value.split("\n\n")[0] if found.docstring else ""
        about = " ".join(about.split()).replace("|", "\\|")
        rows.append(f"| [`{name}`][{found.path}] | {about} |")
    return "\n".join(rows) + "\n"


def lanes() -> str:
    """Frame with the page of a cache at work."""
    return f'<iframe src="{LANES}" title="A cache at work"></iframe>\n'


@lru_cache(maxsize=1)
def _package() -> griffe.Module:
    package = griffe.load(
        "kvalign", search_paths=[ROOT], try_relative_path=False, resolve_aliases=True
    )
    assert isinstance(package, griffe.Module)
    return package
