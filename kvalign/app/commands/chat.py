"""`kvalign chat`: one endless conversation in the terminal."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvalign.app.sessions.conversation import Conversation, ConversationSettings
from kvalign.foundation.errors import ExistsError, Killed, UserError, escape_controls
from kvalign.foundation.names import unknown
from kvalign.streaming.chat import CUT, SYSTEM

COMMANDS = {
    "/help": "this list",
    "/continue": "let an answer go on that was cut",
    "/memory": "how much is in the cache, which turns are out of it, and how to keep more",
    "/system": "the system prompt, which begins the conversation and stays",
    "/forget N": "cut turn N and its answer; what follows is not encoded again",
    "/edit N TEXT": "replace your words in turn N; what follows is not encoded again",
    "/undo": "take the last /forget or /edit back, before the next turn",
    "/save [FILE]": "save the conversation to FILE, now and after each answer",
    "/reset": "start again, with the same --system",
    "/exit": "leave, like Ctrl-D",
}


def chat(settings: ConversationSettings, as_json: bool) -> dict[str, Any]:
    def say(line: str) -> None:
        print(escape_controls(line), file=sys.stderr, flush=True)

    settings = settings.resolved()
    conversation = Conversation(settings, settings.load())
    stream = conversation.stream
    is_scripted = settings.say is not None or not sys.stdin.isatty()
    shows_turns = (is_scripted and settings.say is None) or len(settings.say or ()) > 1
    if not as_json:
        leave = "" if is_scripted else "; /help, Ctrl-D leaves"
        say(f"{conversation.about()}{leave}")
    answers: list[dict] = []
    num_out, offer = conversation.num_forgotten, conversation.memory_offer()
    with conversation.keeping():
        for turn in turns(settings.say):
            goes_on = settings.say is None and turn == "/continue"
            if goes_on and not conversation.is_cut:
                say("there is no answer that was cut: say something")
                continue
            # The first word is a slash and letters; `/etc/hosts` begins a turn.
            is_command = settings.say is None and re.match(r"/[A-Za-z]*(\s|$)", turn)
            if is_command and not goes_on:
                if turn == "/exit":
                    break
                try:
                    say(obey(turn, conversation))
                except (UserError, OSError) as error:
                    say(str(error))
                continue
            if shows_turns and not as_json:
                print("\n" * bool(answers) + f"> {escape_controls(turn)}", flush=True)
            try:
                for piece in conversation.answer(None if goes_on else turn):
                    if not as_json:
                        print(piece, end="", flush=True)
            finally:
                if not as_json:
                    print(CUT * conversation.is_cut, flush=True)
            timing = stream.timing()
            answer = {"turn": turn, "text": stream.text, "is_cut": stream.is_cut, **timing}
            answers.append({**answer, "num_forgotten_turns": conversation.num_forgotten})
            if not as_json:
                most = f" by --max-new-tokens {stream.sampling.max_new_tokens}" * stream.is_cut
                cut = f", cut{most} (/continue goes on)" * conversation.is_cut
                say(
                    f"[{timing['num_tokens']} tokens with {stream.method.title}{cut}, "
                    f"{timing['ms_per_token']:.2f} ms/token; {len(stream.ids)} in all]"
                )
                if conversation.is_loop:
                    say("[the answer goes round in circles: raise --repetition-penalty]")
                if conversation.num_forgotten > num_out:
                    say(f"[{conversation.forgotten_in_words()}{'; ' * bool(offer)}{offer}]")
                    offer = ""  # said once
            num_out = conversation.num_forgotten
    values = settings.values_of(stream) | {"system": stream.notes.get(SYSTEM)}
    return {"settings": values, "answers": answers}


def turns(say: Sequence[str] | None = None) -> Iterator[str]:
    """Yield the user's turns, without empty ones: only `say`, or else those on stdin. In a terminal
    the first Ctrl-C instead of a turn asks for confirmation.
    """
    if say is not None:
        yield from say
        return
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401  line editing in input()

    is_warned = False
    while True:
        try:
            turn = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt as stop:
            if is_warned or isinstance(stop, Killed):
                raise
            is_warned = True
            print("\nCtrl-C again leaves, like Ctrl-D", file=sys.stderr)
            continue
        is_warned = False
        if turn:
            yield turn


def obey(line: str, conversation: Conversation) -> str:
    """Run a command that neither leaves nor goes on: its answer, or UserError if it fails."""
    name, _, rest = line.partition(" ")
    names = [usage.split()[0] for usage in COMMANDS]
    if name not in names:
        raise UserError(unknown("command", name, names))
    if name == "/save":
        return _save(conversation, rest.strip())
    if name in ("/forget", "/edit"):
        return _edit(name, rest, conversation)
    if rest.strip():
        if name == "/system":
            raise UserError("it can only be set at the start: kvalign chat --system TEXT")
        raise UserError(f"{name} takes no argument, got {rest.strip()!r}")
    if name == "/memory":
        return conversation.in_words()
    if name == "/undo":
        conversation.undo_edit()
        return "the conversation is as before the edit"
    if name == "/system":
        none = "none: kvalign chat --system TEXT begins with one"
        return conversation.stream.notes.get(SYSTEM, none)
    if name == "/reset":
        conversation.reset()
        path = conversation.path
        until = f"; {path} is written after the next answer" if path else ""
        return f"the conversation starts again{until}"
    return "\n".join(f"{usage:14}{about}" for usage, about in COMMANDS.items())


def _edit(name: str, rest: str, conversation: Conversation) -> str:
    number, _, text = rest.strip().partition(" ")
    if not (number.isascii() and number.isdigit()) or bool(text.strip()) != (name == "/edit"):
        usage = next(usage for usage in COMMANDS if usage.startswith(name))
        raise UserError(f"it is {usage}, with the number of a turn, the first being 1")
    if name == "/edit":
        return conversation.edit(int(number), text.strip())
    return conversation.forget(int(number))


def _save(conversation: Conversation, name: str) -> str:
    path = Path(name) if name else conversation.path
    if path is None:
        raise UserError("/save needs a file: /save talk.safetensors")
    if path != conversation.path and path.exists():
        raise ExistsError(f"{path} exists: name another file")
    conversation.save(path)
    return f"saved: {path}; continue it with {conversation.to_go_on()}"
