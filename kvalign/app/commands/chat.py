"""`kvalign chat`: one endless conversation in the terminal."""

from kvalign.app.conversation import ConversationSettings

SETTINGS = ConversationSettings


def run(settings: ConversationSettings, as_json: bool) -> None:
    import json
    import sys
    from dataclasses import asdict

    from kvalign.app.chat_commands import is_command, obey
    from kvalign.app.conversation import Conversation, turns
    from kvalign.errors import UserError
    from kvalign.escape import escape_controls

    def say(line: str) -> None:
        print(escape_controls(line), file=sys.stderr, flush=True)

    conversation = Conversation(settings, settings.load())
    stream = conversation.stream
    is_piped = settings.say is None and not sys.stdin.isatty()
    if not as_json:
        leave = "" if settings.say or is_piped else "; /help, Ctrl-D leaves"
        say(f"{conversation.about()}{leave}")
    answers: list[dict] = []
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
        for piece in conversation.answer(turn):
            if not as_json:
                print(piece, end="", flush=True)
        timing = stream.timing()
        answers.append({"turn": turn, "text": stream.text, **timing})
        if not as_json:
            print(flush=True)
            say(
                "[{num_tokens} tokens by {method}, {ms_per_token:.2f} ms/token; {num_ids} in all]"
                "".format(method=stream.method.title, num_ids=len(stream.ids), **timing)
            )
    if as_json:
        taken = {"method": stream.method.name, **asdict(stream.sampling)}
        print(json.dumps({"settings": settings.as_dict() | taken, "answers": answers}))
