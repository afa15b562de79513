"""The script for fish (3.4 or later)."""

from collections.abc import Iterator, Mapping

from kvalign.completion import Argument, steps

_SCRIPT = """# Completion of kvalign for fish, made by: kvalign completion fish

# Whether the words before the cursor begin with these.
function __kvalign_in
    set -l words (commandline -opc)
    set -l last (math (count $argv) + 1)
    test "$words[2..$last]" = "$argv"
end

# Whether they are these, and no more.
function __kvalign_after
    set -l words (commandline -opc)
    test "$words[2..]" = "$argv"
end

complete -c kvalign -f
@LINES@
"""


def script(commands: Mapping[str, list[Argument]]) -> str:
    lines = []
    for words, following in steps().items():
        for word, about in following.items():
            condition = _quote(f"__kvalign_after {words}".strip())
            lines.append(f"complete -c kvalign -n {condition} -a {word} -d {_quote(about)}")
    for command, own in commands.items():
        for argument in own:
            words = " ".join(_offer(argument))
            lines.append(f"complete -c kvalign -n {_quote(f'__kvalign_in {command}')} {words}")
    return _SCRIPT.replace("@LINES@", "\n".join(lines))


def _offer(argument: Argument) -> Iterator[str]:
    """The options of fish's `complete` for an argument."""
    is_flag = argument.name.startswith("--")
    if is_flag:
        yield f"-l {argument.name[2:]}"
        if argument.takes != "nothing":
            yield "-r" if argument.takes == "file" else "-x"
    if argument.takes == "file":
        yield "-F"
    if argument.values and argument.is_list:
        listed = r"printf %s\\\\n " + " ".join(argument.values)
        yield f"-a \"(__fish_complete_list , '{listed}')\""
    elif argument.values:
        yield f"-a {_quote(' '.join(argument.values))}"
    yield f"-d {_quote(argument.about)}"


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
