"""Documents that are almost right: one value replaced, removed or added, at any depth."""

import json

from hypothesis import strategies as st

NAMES = st.sampled_from(["../../etc/passwd", "/etc/passwd", "a\x00b", "train-k1-00000.safetensors"])
PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=True)
PLAIN |= st.text(max_size=20) | NAMES


def within(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)


JSON = st.recursive(PLAIN, within, max_leaves=6)


@st.composite
def changed(draw, values):
    """A document with one of its values, at any depth, replaced, removed or added to."""
    values = json.loads(json.dumps(values))
    place = values
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and draw(st.booleans()):
            place = inner
            continue
        break
    action = draw(st.sampled_from(["replace", "remove", "add"]))
    if action == "replace":
        place[key] = draw(JSON)
    elif action == "remove":
        del place[key]
    elif isinstance(place, dict):
        place[draw(st.text(max_size=8))] = draw(JSON)
    else:
        place.append(draw(JSON))
    return values
