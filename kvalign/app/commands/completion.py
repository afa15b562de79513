"""`kvalign completion`: print a shell script that completes commands, flags and names."""

from dataclasses import dataclass

from kvalign.foundation.settings import Settings, option


@dataclass(frozen=True, kw_only=True)
class CompletionSettings(Settings):
    """Print a script that completes commands, flags and names in a shell. Source it:

      source <(kvalign completion bash)              # zsh: the same with its name
      kvalign completion fish | source

    or write it once to the shell's folder:

      ~/.local/share/bash-completion/completions/kvalign
      ~/.config/fish/completions/kvalign.fish
      _kvalign in a folder of zsh's $fpath

    Example:
        kvalign completion bash
    """

    shell: str = option(help="bash, zsh or fish", choices=("bash", "zsh", "fish"), positional=True)


def completion(settings: CompletionSettings, as_json: bool) -> None:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["kvalign"], shell=settings.shell), end="")
