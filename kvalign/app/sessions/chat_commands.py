"""Commands within a conversation: `/help`, `/save talk.safetensors`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvalign.app.sessions.conversation import SYSTEM
from kvalign.app.sessions.turns_in_cache import all_in_words
from kvalign.foundation.errors import ExistsError, UserError
from kvalign.foundation.registry import unknown

if TYPE_CHECKING:
    from kvalign.app.sessions.conversation import Conversation

COMMANDS = {
    "/help": "this list",
    "/continue": "let an answer go on that was cut",
    "/tokens": "length of the conversation, and the part of it that is in the cache",
    "/memory": "which turns are out of the cache, and how to keep more",
    "/system": "the system prompt, which begins the conversation and stays",
    "/forget N": "cut turn N and its answer; what follows is not encoded again",
    "/edit N TEXT": "replace your words in turn N; what follows is not encoded again",
    "/undo": "take the last /forget or /edit back, before the next turn",
    "/save [FILE]": "save the conversation to FILE, now and after each answer",
    "/reset": "start again, with the same --system",
    "/exit": "leave, like Ctrl-D",
}


def is_command(line: str) -> bool:
    """Return whether the first word is a slash and letters; `/etc/hosts` begins a turn."""
    return re.match(r"/[A-Za-z]*(\s|$)", line) is not None


def obey(line: str, conversation: Conversation) -> str:
    """Run a command that neither leaves nor goes on, and return its answer; UserError if it
    fails.
    """
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
    if name == "/tokens":
        return _tokens(conversation)
    if name == "/memory":
        return all_in_words(conversation.stream)
    if name == "/undo":
        conversation.stream.undo_edit()
        return "the conversation is as before the edit"
    if name == "/system":
        none = "none: kvalign chat --system TEXT begins with one"
        return conversation.stream.notes.get(SYSTEM, none)
    if name == "/reset":
        conversation.reset()
        until = (
            f"; {conversation.path} is written after the next answer" if conversation.path else ""
        )
        return f"the conversation starts again{until}"
    return "\n".join(f"{usage:14}{about}" for usage, about in COMMANDS.items())


def _edit(name: str, rest: str, conversation: Conversation) -> str:
    number, _, text = rest.strip().partition(" ")
    if not (number.isascii() and number.isdigit()) or bool(text.strip()) != (name == "/edit"):
        usage = next(usage for usage in COMMANDS if usage.startswith(name))
        raise UserError(f"it is {usage}, with the number of a turn, the first being 1")
    return conversation.edit(int(number), text.strip() or None)


def _save(conversation: Conversation, name: str) -> str:
    path = Path(name) if name else conversation.path
    if path is None:
        raise UserError("/save needs a file: /save talk.safetensors")
    if path != conversation.path and path.exists():
        raise ExistsError(f"{path} exists: name another file")
    conversation.save(path)
    return f"saved: {path}; continue it with {conversation.to_go_on()}"


def _tokens(conversation: Conversation) -> str:
    stream = conversation.stream
    num_fed, num_evicted = stream.num_fed, stream.num_evicted
    return (
        f"{len(stream.ids)} tokens; in the cache: {num_fed - num_evicted}, of "
        f"{stream.method.sizes.cache_size} at most; evicted: {num_evicted}; "
        f"not fed yet: {len(stream.ids) - num_fed}"
    )
