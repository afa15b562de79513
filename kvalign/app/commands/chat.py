"""`kvalign chat`: one endless conversation in the terminal."""

import sys
from typing import Any

from kvalign.app.sessions.conversation import ConversationSettings
from kvalign.foundation.errors import UserError
from kvalign.foundation.escape import escape_controls


def run(settings: ConversationSettings, as_json: bool) -> dict[str, Any]:
    from kvalign.app.sessions.chat_commands import is_command, obey
    from kvalign.app.sessions.conversation import CUT, SYSTEM, Conversation, turns
    from kvalign.app.sessions.turns_in_cache import in_words, memory_offer, num_forgotten

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
    num_out, offer = num_forgotten(stream), memory_offer(stream)
    with conversation.keeping():
        for turn in turns(settings.say):
            goes_on = settings.say is None and turn == "/continue"
            if goes_on and not conversation.is_cut:
                say("there is no answer that was cut: say something")
                continue
            if settings.say is None and is_command(turn) and not goes_on:
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
            answers.append({**answer, "num_forgotten_turns": num_forgotten(stream)})
            if not as_json:
                most = f" by --max-new-tokens {stream.sampling.max_new_tokens}" * stream.is_cut
                cut = f", cut{most} (/continue goes on)" * conversation.is_cut
                say(
                    f"[{timing['num_tokens']} tokens with {stream.method.title}{cut}, "
                    f"{timing['ms_per_token']:.2f} ms/token; {len(stream.ids)} in all]"
                )
                if conversation.is_loop:
                    say("[the answer goes round in circles: raise --repetition-penalty]")
                if num_forgotten(stream) > num_out:
                    say(f"[{in_words(stream)}{'; ' * bool(offer)}{offer}]")
                    offer = ""  # said once
            num_out = num_forgotten(stream)
    values = settings.values_of(stream) | {"system": stream.notes.get(SYSTEM)}
    return {"settings": values, "answers": answers}
