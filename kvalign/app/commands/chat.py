"""`kvalign chat`: one endless conversation in the terminal."""

import sys
from typing import Any

from kvalign.app.sessions.conversation import ConversationSettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.escape import escape_controls


def run(settings: ConversationSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.app.sessions.chat_commands import is_command, obey
    from kvalign.app.sessions.conversation import SYSTEM, Conversation, turns

    def say(line: str) -> None:
        print(escape_controls(line), file=sys.stderr, flush=True)

    conversation = Conversation(settings, settings.load())
    stream = conversation.stream
    is_piped = settings.say is None and not sys.stdin.isatty()
    if not as_json:
        leave = "" if settings.say or is_piped else "; /help, Ctrl-D leaves"
        say(f"{conversation.about()}{leave}")
    answers: list[dict] = []
    with conversation.keeping():
        for turn in turns(settings.say):
            if settings.say is None and is_command(turn):
                if turn == "/exit":
                    break
                try:
                    say(obey(turn, conversation))
                except (UserError, OSError) as error:
                    say(str(error))
                continue
            if is_piped and not as_json:
                print("\n" * bool(answers) + f"> {escape_controls(turn)}", flush=True)
            try:
                for piece in conversation.answer(turn):
                    if not as_json:
                        print(piece, end="", flush=True)
            finally:
                if not as_json:
                    print(flush=True)
            timing = stream.timing()
            answers.append({"turn": turn, "text": stream.text, "is_cut": stream.is_cut, **timing})
            if not as_json:
                cut = f", cut by --max-new-tokens {stream.sampling.max_new_tokens}" * stream.is_cut
                say(
                    f"[{timing['num_tokens']} tokens by {stream.method.title}{cut}, "
                    f"{timing['ms_per_token']:.2f} ms/token; {len(stream.ids)} in all]"
                )
    used = settings.used(stream) | {"system": stream.notes.get(SYSTEM)}
    return {"settings": used, "answers": answers}
