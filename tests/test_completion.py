"""TAB offers every command, flag and name, and starts nothing: the scripts are run by the shells
themselves where these are installed.
"""

import dataclasses
import importlib
import re
import shlex
import shutil
import subprocess

import pytest

from kvalign import checkpoints
from kvalign.aligners import Aligner
from kvalign.cli import COMMANDS, main, module_name, settings_class
from kvalign.commands.completion import CompletionSettings
from kvalign.completion import _names, arguments, script
from kvalign.data_gen import corpora
from kvalign.methods import METHODS

BASH, ZSH, FISH = map(shutil.which, ("bash", "zsh", "fish"))
SHELLS = CompletionSettings.__dataclass_fields__["shell"].metadata["choices"]

FIRST = {command.split()[0] for command in COMMANDS}
EVALS = {command.split()[1] for command in COMMANDS if command.startswith("eval ")}
CORPORA = {"python-docs", *corpora.HUB, "hub:", "text:", "marked:"}
# What is typed, and what is offered for its last word.
LINES = [
    ("kvalign ", FIRST),
    ("kvalign gen", {"generate", "gen-data"}),
    ("kvalign eval ", EVALS),
    ("kvalign eval str", {"streameval"}),
    ("kvalign generate --method ", set(METHODS)),
    ("kvalign generate --method kv", {"kvalign"}),
    ("kvalign generate --model ", set(checkpoints.MODELS)),
    ("kvalign generate --aligner kvalign-llama", {n for n in checkpoints.ALIGNERS if "llama" in n}),
    ("kvalign generate --dtype ", {"float32", "bfloat16", "float16"}),
    ("kvalign generate --cache-size ", set()),
    ("kvalign generate --cache-size 64 --stop", {"--stop-at-end"}),
    ("kvalign eval perplexity --methods window,", {f"window,{name}" for name in METHODS}),
    ("kvalign eval perplexity --methods window,kva", {"window,kvalign"}),
    ("kvalign eval perplexity --reference re", {"recompute"}),
    ("kvalign eval perplexity --corpus ", CORPORA),
    ("kvalign eval latency --aligner-kinds table,", {f"table,{name}" for name in Aligner.kinds}),
    ("kvalign eval chat --prompts ", {"own", "mt-bench"}),
    ("kvalign gen-data --json --corpus python-docs,wi", {"python-docs,wikitext"}),
    ("kvalign train --aligner-kind ", set(Aligner.kinds)),
    ("kvalign train --no-", {"--no-resume"}),
    ("kvalign eval run q", {"quick"}),
    ("kvalign eval run quick --ov", {"--override"}),
    ("kvalign completion ", set(SHELLS)),
    ("kvalign completion --", {"--help"}),
    ("kvalign nothing ", set()),
]


def flags_of(command):
    """What `kvalign COMMAND --help` shows, but for the negations of what is off anyway."""
    cls = settings_class(importlib.import_module(module_name(command)))
    on = {"--no-" + f.name.replace("_", "-") for f in dataclasses.fields(cls) if f.default is True}
    return {"--help", *cls.flags(), *on}


def bash_offers(lines, tmp_path):
    """What bash's function makes of each line; without a PATH, so that it can start no program."""
    (tmp_path / "kvalign.bash").write_text(script("bash"))
    run = ["source kvalign.bash"]
    for line in lines:
        # The words as readline cuts them: = and : are words of their own.
        words = [w for w in re.split(r"([=:]+)| ", line) if w]
        words += [""] if line.endswith(" ") else []
        run.append(f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}; _kvalign")
        run.append('printf "%s\\n" "${COMPREPLY[@]}" --END--')
    done = subprocess.run(
        [BASH, "--norc", "-c", "\n".join(run)],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return [set(block.split()) for block in done.stdout.split("--END--")[:-1]]


needs_bash = pytest.mark.skipif(not BASH, reason="no bash here")


@needs_bash
def test_bash_offers_names(tmp_path):
    found = bash_offers([line for line, _ in LINES], tmp_path)
    assert dict(zip([line for line, _ in LINES], found, strict=True)) == dict(LINES)


@needs_bash
def test_bash_offers_every_flag_of_every_command(tmp_path):
    found = bash_offers([f"kvalign {command} -" for command in COMMANDS], tmp_path)
    assert found == [flags_of(command) for command in COMMANDS]


@needs_bash
def test_bash_takes_a_flag_and_its_value_as_one_word(tmp_path):
    lines = [
        "kvalign generate --model=gp",
        "kvalign generate --model=",
        "kvalign train --corpus=te",
    ]
    assert bash_offers(lines, tmp_path) == [{"gpt2-mini"}, set(checkpoints.MODELS), {"text:"}]


@needs_bash
def test_bash_leaves_paths_to_its_own_completion_of_files(tmp_path):
    lines = [
        "generate --prompt-file ",
        "report ",
        "generate --aligner ./my",
        "train --corpus text:x",
    ]
    assert bash_offers([f"kvalign {line}" for line in lines], tmp_path) == [set()] * 4
    asked = [BASH, "--norc", "-c", "source kvalign.bash; complete -p kvalign"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "complete -o default -F _kvalign kvalign\n"


@needs_bash
def test_sourced_as_the_help_says(tmp_path):
    """`source <(kvalign completion bash)`; the script is what the command prints."""
    code = "source <(cat kvalign.bash); COMP_WORDS=(kvalign doc); COMP_CWORD=1; _kvalign; "
    (tmp_path / "kvalign.bash").write_text(script("bash"))
    asked = [BASH, "--norc", "-c", code + 'echo "${COMPREPLY[@]}"']
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "doctor\n"


def test_every_choice_is_offered():
    for command in COMMANDS:
        cls = settings_class(importlib.import_module(module_name(command)))
        own = {argument.name: argument.values for argument in arguments(command)}
        for field in dataclasses.fields(cls):
            name = "--" + field.name.replace("_", "-")
            name = field.name.upper() if field.metadata["positional"] else name
            assert set(field.metadata["choices"] or ()) <= set(own[name])


def test_every_field_with_names_is_one_of_a_command():
    known = {argument.name for command in COMMANDS for argument in arguments(command)}
    for name in _names():
        assert {name.upper(), "--" + name.replace("_", "-")} & known


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_text_that_calls_nothing(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text == script(shell) and text.endswith("\n")
    assert "@" + "STEPS@" not in text and "@COMMANDS@" not in text and "@LINES@" not in text
    assert "$(kvalign" not in text and "python" not in text.replace("python-docs", "")


def test_zsh_has_every_flag_of_every_command():
    blocks = re.findall(r"(?ms)^  \('([a-z -]+)'\)\n    _arguments \\\n(.*?) ;;$", script("zsh"))
    assert [command for command, _ in blocks] == list(COMMANDS)
    for command, block in blocks:
        specs = shlex.split(block.replace("\\\n", ""))  # quotes are those of sh
        assert {re.match(r"--[\w-]+|1", spec)[0] for spec in specs} - {"1"} == flags_of(command)
        for argument, spec in zip(arguments(command), specs, strict=True):
            offered = spec.replace("\\:", ":").split(" -- ")
            assert argument.values == (tuple(offered[-1].split()) if len(offered) > 1 else ())


def test_fish_has_every_flag_of_every_command():
    found = {command: set() for command in COMMANDS}
    for line in script("fish").splitlines():
        # Single quotes pair up once what is escaped is left out.
        assert re.sub(r"\\.", "", line).count("'") % 2 == 0, line
        if match := re.match(r"complete -c kvalign -n '__kvalign_in ([a-z -]+)' -l (\S+)", line):
            found[match[1]].add("--" + match[2])
    assert found == {command: flags_of(command) for command in COMMANDS}


@pytest.mark.skipif(not ZSH, reason="no zsh here")
def test_zsh_reads_its_script(tmp_path):
    (tmp_path / "_kvalign").write_text(script("zsh"))
    done = subprocess.run([ZSH, "-f", "-n", tmp_path / "_kvalign"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not FISH, reason="no fish here")
def test_fish_offers_names(tmp_path):
    (tmp_path / "kvalign.fish").write_text(script("fish"))
    for line, offered in LINES:
        code = f"source kvalign.fish; complete -C {shlex.quote(line)}"
        asked = [FISH, "--no-config", "-c", code]
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        names = {row.split("\t")[0] for row in done.stdout.splitlines()}
        assert names - {"kvalign.fish"} == offered, line
