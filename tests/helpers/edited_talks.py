"""A talk that a client changes in the middle, and how it is asked on."""

ASKED = {"model": "gpt2-mini", "max_tokens": 8, "temperature": 1, "seed": 3}
"""Drawn, since another text has another answer then."""
TALK = [
    "The ship was built in the north of the country , and the men of the town were proud of it .",
    "The king came to see it with the queen , and the people of the island sang a song for them .",
    "Then the storm came , and the river rose , and the bridge of stone was lost in the night .",
]


def user(text):
    return {"role": "user", "content": text}


def edited(messages):
    """The messages of the talk, with two changes."""
    first = user(TALK[0].replace("town", "village"))
    third = user(TALK[2].replace("of stone", "of wood"))
    return [first, *messages[1:4], third, messages[5], user("And then ?")]


def more(messages):
    return [*messages, user("Why ?")]
