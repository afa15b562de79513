"""The script for bash (4 or later)."""

import shlex
from collections.abc import Mapping

from kvalign.completion import Argument, steps

_SCRIPT = """# Completion of kvalign for bash, made by: kvalign completion bash
_kvalign() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}
    local takes= values= flags= list= given= IFS=$' \\t\\n'
    COMPREPLY=()
    if [[ $word == : || $before == : ]]; then return; fi  # text:PATH is three words: a file
    if [[ $word == = ]]; then word=; fi                   # and so is --flag=value
    if [[ $before == = ]]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi
    case $COMP_CWORD,$command in
@STEPS@
    esac
    case $takes,$command in
@COMMANDS@
    esac
    if [[ -z $takes || $word == -* ]]; then values=$flags takes=value list=; fi
    if [[ $takes == value ]]; then compopt +o default 2>/dev/null; fi
    if [[ $list && $word == *,* ]]; then given=${word%,*}, word=${word##*,}; fi
    COMPREPLY=($(compgen -P "$given" -W "$values" -- "$word"))
    if [[ ${COMPREPLY-} == *: ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _kvalign kvalign
"""


def script(commands: Mapping[str, list[Argument]]) -> str:
    """The script; without a match for a name, bash offers files where they may be given."""
    first = [f"    1,*) takes=value values={_words(steps()[''])} ;;"]
    for word, following in steps().items():
        if word:
            first.append(f"    2,{word}) takes=value values={_words(following)} ;;")
            first.append(f'    *,{word}) command="{word} ${{COMP_WORDS[2]}}" ;;')
    cases = [line for command, own in commands.items() for line in _case(command, own)]
    made = _SCRIPT.replace("@STEPS@", "\n".join(first))
    return made.replace("@COMMANDS@", "\n".join(cases))


def _case(command: str, own: list[Argument]) -> list[str]:
    """The lines that say what a command offers: its flags, and what follows each of them."""
    flags = [argument.name for argument in own if argument.name.startswith("--")]
    lines = [f"    ,{shlex.quote(command)})", f"        flags={_words(flags)}"]
    branches: dict[str, list[str]] = {}
    for argument in own:
        if argument.takes != "nothing":
            name = argument.name if argument.name.startswith("--") else "*"
            branches.setdefault(_offer(argument), []).append(name)
    ordered = sorted(branches.items(), key=lambda item: "*" in item[1])  # * takes what is left
    if ordered:
        lines.append("        case $before in")
        lines += [f"        {'|'.join(names)}) {offer} ;;" for offer, names in ordered]
        lines.append("        esac")
    return [*lines, "        ;;"]


def _offer(argument: Argument) -> str:
    words = [f"takes={argument.takes}"]
    words += [f"values={_words(argument.values)}"] if argument.values else []
    return " ".join([*words, "list=yes"] if argument.is_list else words)


def _words(words) -> str:
    return shlex.quote(" ".join(words))
