"""The documentation is true: its commands and its Python run, its links lead somewhere, and a page
of it asks the network for nothing.

Pages run as they stand, each in a folder of its own, but smaller, with small stand-ins for what the
hub has, and without what cannot run in a test. The tables below say all of that.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.browser import watched
from helpers.doc_pages import PAGES, ROOT, blocks, lines_of
from helpers.hub_data import write_data_set
from helpers.published_files import random_network
from helpers.result_parts import RESULTS
from helpers.smaller import INSIDE, TEXT, command_of, output_of, run_cell, smaller, smaller_python
from helpers.tiny_models import tiny_model
from transformers import AutoTokenizer

from kvalign import checkpoints
from kvalign.methods.registry import METHODS
from kvalign.policies import POLICIES

# Names on the hub, and the architecture of the random model of that name.
HUB = {"bigscience/bloom-560m": "bloom", "facebook/opt-125m": "opt"}
HUB |= {f"HuggingFaceTB/SmolLM2-135M{more}": "llama" for more in ("", "-Instruct")}
HUB |= dict.fromkeys(("distilbert/distilgpt2", "openai-community/gpt2"), "gpt2")
# Corpora and files that pages name.
WIKITEXT = "Salesforce/wikitext"
TEXTS = ("wikitext-2/test.txt", "wikitext-2/valid.txt")
PUBLISHED = ("keys_network_distilgpt2.pth", "values_network_distilgpt2.pth")
# Lines of a shell that are not run, and why.
NOT_RUN = {
    r"make results PART=\S+": "sets up an environment; tests/scripts/test_results.py",
    r"pip install .+": "sets up an environment; .ci/run installs the wheel",
    r"git clone URL .+": "is where the reader already is",
    r"kvalign models --fetch .+": "loads a model; tests/app/test_fetch.py",
    r"kvalign (chat --cache-size 256|serve --edit)": "has the fetched model; flags are read alone",
    r"hf upload \S+ \S+": "writes to the hub; here a copy of the folder takes its name",
}
# Pages whose sections begin in folders of their own, as a reader may begin at any.
BY_SECTION = ("README.md",)
LONG = ("README.md", "docs/evaluation.md", "docs/tutorials/report.md")  # they run whole suites
LONG += ("docs/footguns.md", "docs/verify.md")
TUTORIALS = ("edit", "loop", "memory", "method", "policy", "stream", "train")
LONG += tuple(f"docs/tutorials/{name}.md" for name in TUTORIALS)
SHOWN = ("docs/tutorials/edit.md", "docs/tutorials/pieces.md")  # with what their Python prints
LANGUAGES = {"bash", "python", "yaml", "text", "bibtex", ""}  # only the first three are run
SAID = "Who lived on the island?\nAnd who lives there now?\n"  # what chat reads from stdin


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder in which the pages' hub names and files are found."""
    folder = tmp_path_factory.mktemp("hub")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints.model_path("gpt2-mini"))
    for name, kind in HUB.items():
        length = {"gpt2": "n_positions", "bloom": "seq_length"}.get(kind, "max_position_embeddings")
        tiny_model(kind, vocab_size=len(tokenizer), **{length: 1024}).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [{"text": line} for line in TEXT.splitlines()]
    write_data_set(folder / WIKITEXT, "wikitext-103-raw-v1", {"train": rows, "test": rows})
    for name in TEXTS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(TEXT)
    for name, hidden in zip(PUBLISHED, ((256, 64), (64, 128)), strict=True):
        torch.save(random_network(*hidden, num_positions=256), folder / name)
    return folder


@pytest.fixture
def enter(hub, tmp_path, monkeypatch, undrawn, offline, short_runs):
    """Begin in an empty folder, where all of `hub` is at hand."""

    def begin(name: str) -> None:
        folder = tmp_path / re.sub(r"\W+", "-", name)
        shutil.copytree(hub, folder, copy_function=os.link)
        monkeypatch.chdir(folder)

    monkeypatch.setattr("kvalign.app.commands.eval_run.Cell.output", run_cell)
    monkeypatch.setattr("kvalign.eval.drawing.save", lambda figure, path: path.touch())
    for name, value in INSIDE.items():
        monkeypatch.setattr(name, value)
    known = [(registry, dict(registry)) for registry in (METHODS, POLICIES)]
    yield begin
    for registry, entries in known:
        registry.clear()
        registry.update(entries)


def run_shell(words):
    not_run = [p for p in NOT_RUN if re.fullmatch(p, shlex.join(words))]
    if words[0] == "kvalign":
        made = smaller(words[1:])
        if not not_run:
            output_of(made)
        return
    (pattern,) = not_run
    if pattern.startswith("hf upload"):
        shutil.copytree(words[3], words[2])


def run_python(block, page, names):
    """Run it; what it prints, which on some pages stands beside it."""
    code = "\n" * block.line + smaller_python(block.text)  # a traceback tells the page's own line
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, ROOT / page, "exec"), names)
    if page in SHOWN:
        beside = re.findall(r"  # (.+)$", block.text, re.MULTILINE)
        lines = printed.getvalue().splitlines()
        assert [line.strip() for line in lines][: len(beside)] == beside
    return printed.getvalue()


def is_run(block):
    return block.language in ("bash", "python")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in LONG else ())
        for page in PAGES
        if any(map(is_run, blocks(page)))
    ],
)
@pytest.mark.filterwarnings("ignore:.*generation flags are not valid.*")
def test_page_runs(page, enter, monkeypatch):
    section, names = None, {"__name__": "page"}
    for block in blocks(page):
        of_session = block.section if page in BY_SECTION else ""
        if of_session != section:
            section = of_session
            enter(section or page)
        if block.language == "python":
            printed = run_python(block, page, names)
        elif block.language == "text" and page in SHOWN:
            assert printed.endswith(block.text)
        elif block.language == "bash":
            for words in lines_of(block.text):
                monkeypatch.setattr("sys.stdin", io.StringIO(SAID))
                run_shell(words)
        elif block.language == "yaml" and block.title:
            Path(block.title).write_text(block.text)


def test_nothing_that_looks_like_a_command_is_left_out():
    for page in PAGES:
        for block in blocks(page):
            assert block.language in LANGUAGES, f"{page}:{block.line}"
            if not is_run(block):
                assert not re.search(r"^(kvalign|make|pip|\$|>>>) ", block.text, re.MULTILINE)


def test_commands_of_results_are_known():
    """The figures' own commands take hours: here they are only read."""
    for page in sorted(RESULTS.glob("*.md")):
        found = [b for b in blocks(f"eval/results/{page.name}") if b.language == "bash"]
        for words in (words for block in found for words in lines_of(block.text)):
            if words[0] == "kvalign":
                smaller(words[1:], {})


def test_make_targets_are_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in [*PAGES, "CONTRIBUTING.md"]:
        for name in re.findall(r"(?:^|`)make ([\w-]+)", (ROOT / page).read_text(), re.MULTILINE):
            assert name in targets, f"{page}: make {name}"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. A warning is an error: links, anchors, cross references, pages left out."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    more = {"NO_MKDOCS_2_WARNING": "1", "SITE_SOURCES": "false"}
    how = dict(env=os.environ | more, capture_output=True, text=True)
    done = subprocess.run(command, cwd=ROOT, timeout=300, **how)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_site_builds_without_a_warning(site):
    reference = (site / "reference" / "command-line.html").read_text()
    assert command_of(["eval", "run"]) in reference and "--cache-sizes" in reference
    assert not re.search(
        r"<!-- (?!end)\w+ -->", "".join(p.read_text() for p in site.rglob("*.html"))
    )
    assert "<iframe" in (site / "cache.html").read_text()
    code = (site / "code.html").read_text()
    assert (
        code.count("reference/") > 50 and 'reference/streams.html#kvalign.streaming.loop"' in code
    )
    assert (site / "results" / "memory.html").exists() and (site / "contributing.html").exists()


def test_page_asks_the_network_for_nothing(site, browser):
    page, requests, complaints = watched(browser.new_context())
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").click()
    ready = page.locator(".md-search-result__meta", has_text="Type to start searching")
    ready.wait_for()  # what is typed before the index is read is lost
    page.locator(".md-search__input").press_sequentially("recompute")
    page.locator(".md-search-result__link").first.wait_for()
    page.context.close()
    assert complaints == []
    assert requests and all(url.startswith(site.as_uri()) for url in requests), requests
