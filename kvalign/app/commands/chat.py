"""`kvalign chat`: one endless conversation in the terminal."""

from kvalign.app.conversation import ConversationSettings

SETTINGS = ConversationSettings


def run(settings: ConversationSettings, as_json: bool) -> None:
    import json
    import sys

    from kvalign.app.conversation import Conversation, turns

    conversation = Conversation(settings, settings.load())
    stream = conversation.stream
    answers = []
    for turn in turns(settings.say):
        for piece in conversation.answer(turn):
            if not as_json:
                print(piece, end="", flush=True)
        timing = stream.timing()
        answers.append({"turn": turn, "text": stream.text, **timing})
        if not as_json:
            print(flush=True)
            print(
                "[{num_tokens} tokens by {method}, {ms_per_token:.2f} ms/token; {num_ids} in all]"
                "".format(method=stream.method.title, num_ids=len(stream.ids), **timing),
                file=sys.stderr,
            )
    if as_json:
        taken = settings.as_dict() | {"method": stream.method.name}
        print(json.dumps({"settings": taken, "answers": answers}))
