"""kill -9 in the middle of sessions: each goes on from its last whole turn, and none is corrupt."""

import contextlib
import random
import threading
import time

import openai
import pytest
from helpers.edited_talks import ASKED, TALK, edited, more
from helpers.patience import PATIENCE_S
from helpers.server_kills import attack_sessions, damage
from load import served


@pytest.mark.slow
def test_sessions_survive_kills(tmp_path):
    more = ("--memory", "500")
    found = attack_sessions(tmp_path / "talks", 1, random.Random(0), num_sessions=8, more=more)
    nothing: dict = {"corrupt": [], "lost": [], "left_over": []}
    assert found == {"command": "serve", "kills": 1, "same_result": True, **nothing}


def said(address, messages):
    """An answer, and tokens that were edited."""
    with openai.OpenAI(
        base_url=address, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        reply = client.chat.completions.create(**ASKED, messages=messages)
    return reply.choices[0].message.content, reply.usage.kvalign["edited_tokens"]


def talk(address):
    messages = []
    for text in TALK:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": said(address, messages)[0]})
    return messages


@pytest.mark.slow
def test_an_edit_that_is_killed_changes_nothing(tmp_path):
    flags, rng = ("gpt2-mini", "--cache-size", "250", "--edit"), random.Random(0)
    kept = ("--keep-unnamed", "--sessions", str(tmp_path / "talks"))
    with served(*flags) as (address, _):
        messages = talk(address)
        start_s = time.perf_counter()
        changed = said(address, edited(messages))
        time_s = time.perf_counter() - start_s
        after = said(address, more(messages))
    assert changed[1] > 0
    with served(*flags, *kept) as (address, _):
        assert talk(address) == messages
    for _ in range(3):
        with served(*flags, *kept) as (address, process):
            asking = threading.Thread(target=ask_in_vain, args=(address, edited(messages)))
            asking.start()
            time.sleep(time_s * rng.random())
            process.kill()
            asking.join(PATIENCE_S)
        there = [*(tmp_path / "talks").glob("[!.]*.safetensors")]
        assert there and not any(map(damage, there))
    with served(*flags, *kept) as (address, _):
        # Its answer may have been stored before a kill; then the same one is told again.
        assert said(address, edited(messages)) in (changed, (changed[0], 0))
        assert said(address, more(messages)) == after


def ask_in_vain(address, messages):
    with contextlib.suppress(openai.APIConnectionError):
        said(address, messages)
