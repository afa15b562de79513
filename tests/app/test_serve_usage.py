"""What `kvalign serve` says of a request's tokens: all of the conversation, what is out of the
cache, what was encoded anew.
"""

import pytest
from helpers.pairwise import one_of_each
from helpers.served import serving

import kvalign
from kvalign.streaming.turns import Talk

HEADER = "X-KVAlign-Warning"
MODELS = ("gpt2-mini", "llama-mini")
METHODS = [
    {"method": "kvalign", "memory": 0},
    {"method": "recompute"},
    {"method": "streaming-llm", "num_evicted": "3"},
    {"method": "kvalign", "memory": 20},
]
TURNS = ("Who lived there?", "And what became of the king in the end?", "So?")


def ask(client, model, said, session, **more):
    """The reply to a turn, with its headers."""
    how = dict(model=model, temperature=0, max_tokens=8, extra_body={"session": session}, **more)
    messages = [{"role": "user", "content": said}]
    return client.chat.completions.with_raw_response.create(messages=messages, **how)


def usage_of(reply):
    return reply.parse().usage.model_dump()


def usage_in(chunks):
    *_, last = chunks
    return last.usage.model_dump()


@pytest.mark.parametrize(("number", "name"), one_of_each(range(len(METHODS)), MODELS))
def test_a_session_is_the_stream_of_the_conversation(number, name, minis):
    loaded, method = minis[name], METHODS[number]
    how = dict(cache_size=32, do_sample=False, max_new_tokens=8, stop_at_end=True, **method)
    stream = kvalign.stream(loaded.model, loaded.tokenizer, **how)
    settings = {key: str(x) if key == "num_evicted" else x for key, x in method.items()}
    with serving(loaded, cache_size=32, **settings) as server, server.client() as client:
        for turn in TURNS:
            reply, num_before = ask(client, name, turn, "t"), len(stream.ids)
            stream.feed(Talk(loaded.tokenizer).turn_ids(turn, not stream.ids))
            num_prompt = len(stream.ids)
            first = next(iter(stream))
            at_first = stream.num_evicted
            assert reply.parse().choices[0].message.content == first + "".join(stream)
            usage = usage_of(reply)
            sizes = stream.method.sizes
            assert usage["prompt_tokens"] == num_prompt
            held = max(0, num_before - 1)  # without the answer's last token
            assert usage["prompt_tokens_details"]["cached_tokens"] == held
            assert usage["kvalign"] == {
                "evicted_tokens": stream.num_evicted,
                "forgotten_prompt_tokens": max(0, at_first + sizes.num_recalled - sizes.memory),
                "reencoded_tokens": 0,
                "edited_tokens": 0,
            }
            num = usage["kvalign"]["forgotten_prompt_tokens"]
            said = f"{num} of the prompt's {num_prompt} tokens are out of the cache and forgotten"
            assert (HEADER in reply.headers) == bool(num)
            assert reply.headers.get(HEADER, said).startswith(said)
        assert usage["kvalign"]["evicted_tokens"] > 8


def test_all_forms_say_the_same(minis):
    how = dict(cache_size=32, memory=0)
    with serving(minis["gpt2-mini"], **how) as server, server.client() as client:
        last = {"stream": True, "stream_options": {"include_usage": True}}
        whole, pieces = (
            ask(client, "gpt2-mini", "word " * 60, name, **more)
            for name, more in (("a", {}), ("b", last))
        )
        assert usage_in(pieces.parse()) == usage_of(whole)
        assert pieces.headers[HEADER] == whole.headers[HEADER]
        text = {"model": "gpt2-mini", "prompt": "word " * 60, "max_tokens": 8, "temperature": 0}
        create = client.completions.with_raw_response.create
        whole, pieces = create(**text), create(**text, **last)
        usage = usage_of(whole)
        assert usage_in(pieces.parse()) == usage
        assert pieces.headers[HEADER] == whole.headers[HEADER]
        forgotten = usage["prompt_tokens"] - 32
        assert usage["kvalign"]["forgotten_prompt_tokens"] == forgotten > 0
        assert usage["kvalign"]["evicted_tokens"] == forgotten + usage["completion_tokens"] - 1
        several = usage_of(create(**text | {"n": 2, "prompt": ["word " * 60, "Who?"]}))
        # A prompt is counted once, and each answer; "Who?" and its answer fit.
        assert several["kvalign"]["forgotten_prompt_tokens"] == forgotten
        assert several["kvalign"]["evicted_tokens"] == forgotten + 2 * 7
        short = create(**text | {"prompt": "Who?"})
        assert HEADER not in short.headers
        assert {*usage_of(short)["kvalign"].values()} == {0}
