"""The script for zsh: sourced, or as the file `_kvalign` in a folder of $fpath."""

from collections.abc import Mapping

from kvalign.completion import Argument, steps

_SCRIPT = """#compdef kvalign
# Completion of kvalign for zsh, made by: kvalign completion zsh

# What goes before -- is for compadd; after it are names to offer, to which more is typed if they
# end in a colon.
_kvalign_names() {
  local -i at=${argv[(i)--]}
  local -a options=("${(@)argv[1,at-1]}") names=("${(@)argv[at+1,-1]}")
  compadd "$options[@]" -- ${names:#*:}
  compadd -S '' "$options[@]" -- ${(M)names:#*:}
}

_kvalign_names_or_files() {
  _kvalign_names "$@"
  compset -P '*[,:]'
  _files
}

_kvalign() {
  local command=$words[2]
  local -a offers
  case $CURRENT,$command in
@STEPS@
  esac
  if (( $#offers )); then
    _describe command offers
    return
  fi
  local -a typed=(${=command})
  shift $#typed words
  (( CURRENT -= $#typed ))
  case $command in
@COMMANDS@
  esac
}

if [[ $funcstack[1] == _kvalign ]]; then
  _kvalign "$@"
else
  compdef _kvalign kvalign
fi
"""


def script(commands: Mapping[str, list[Argument]]) -> str:
    first = [f"  2,*) offers=({_described(steps()[''])}) ;;"]
    for word, following in steps().items():
        if word:
            first.append(f"  3,{word}) offers=({_described(following)}) ;;")
            first.append(f'  *,{word}) command="{word} $words[3]" ;;')
    cases = []
    for command, own in commands.items():
        specs = " \\\n      ".join(_quote(_spec(argument)) for argument in own)
        cases.append(f"  ({_quote(command)})\n    _arguments \\\n      {specs} ;;")
    made = _SCRIPT.replace("@STEPS@", "\n".join(first))
    return made.replace("@COMMANDS@", "\n".join(cases))


def _described(offers: Mapping[str, str]) -> str:
    return " ".join(_quote(f"{name}:{about}") for name, about in offers.items())


def _spec(argument: Argument) -> str:
    """An argument as zsh's `_arguments` reads it: --name=[about]:what:action."""
    is_flag = argument.name.startswith("--")
    if argument.takes == "nothing":
        return f"{argument.name}[{_escape(argument.about)}]"
    names = " ".join(_escape(value) for value in argument.values)
    action = "_kvalign_names_or_files" if argument.takes == "file" else "_kvalign_names"
    if argument.is_list and names:
        action = f"_sequence -s , {action} -"
    if not names:
        action = "_files" if argument.takes == "file" else " "
    else:
        action += f" -- {names}"
    what = argument.name.strip("-")
    if not is_flag:
        return f"1:{what}:{action}"
    return f"{argument.name}=[{_escape(argument.about)}]:{what}:{action}"


def _escape(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, "\\" + character)
    return text


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
