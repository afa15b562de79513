"""`kvalign serve` and what clients send: sampling, limits, fields that nobody knows."""

import httpx
import pytest
from helpers.patience import PATIENCE_S
from helpers.served import serving

import kvalign
from kvalign.streaming.chat import talk_defaults

SERVED = dict(cache_size=48, max_streams=4, max_new_tokens=12)
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def post(server):
    with httpx.Client(base_url=server.address, timeout=PATIENCE_S) as one:
        yield lambda path, **body: one.post(path, json={"model": "gpt2-mini", **body})


def text_of(reply):
    return reply.json()["choices"][0]["text"]


def test_without_a_word_an_answer_is_drawn_as_in_a_chat(server, loaded, post):
    assert server.service.defaults == {**talk_defaults(loaded.model), "max_new_tokens": 12}
    how = dict(cache_size=48, max_new_tokens=12, seed=3, **talk_defaults(loaded.model))
    stream = kvalign.stream(loaded.model, loaded.tokenizer, "The king", **how)
    assert text_of(post(TEXT, prompt="The king", max_tokens=12, seed=3)) == "".join(stream)


@pytest.mark.parametrize(
    "asked", [dict(top_k=3), dict(top_k=-1), dict(min_p=0.2), dict(repetition_penalty=1.5)]
)
def test_fields_of_sampling_are_those_of_a_stream(asked, loaded, post):
    field = {name: max(value, 0) for name, value in asked.items()}
    how = dict(temperature=1.0, top_p=1.0, do_sample=True, max_new_tokens=12, cache_size=48, seed=3)
    stream = kvalign.stream(loaded.model, loaded.tokenizer, "The king", **how, **field)
    request = dict(temperature=1, top_p=1, max_tokens=12, seed=3, **asked)
    assert text_of(post(TEXT, prompt="The king", **request)) == "".join(stream)


def test_a_length_above_the_limit_is_the_limit(client):
    choice = client.chat.completions.create(
        model="gpt2-mini", messages=HELLO, max_tokens=10**9, temperature=0
    )
    assert choice.choices[0].finish_reason == "length" and choice.usage.completion_tokens == 12


def test_names_that_no_api_has_are_told(post):
    reply = post(TEXT, prompt="Hello", max_tokens=2, **{"temprature": 1, "é\n": 1})
    assert reply.status_code == 200 and reply.headers["X-KVAlign-Ignored"] == "temprature, ??"
    assert "X-KVAlign-Ignored" not in post(TEXT, prompt="Hello", max_tokens=2).headers


def test_a_template_is_given_what_a_request_says(loaded, monkeypatch):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if thinks is defined and not thinks %}no thoughts {% endif %}answer:"
    )
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    with serving(loaded, cache_size=48) as one, one.client() as client:

        def num_prompt(**values):
            given = dict(extra_body={"chat_template_kwargs": values}, max_tokens=2)
            asked = dict(model="gpt2-mini", messages=HELLO, **given)
            return client.chat.completions.create(**asked).usage.prompt_tokens

        assert num_prompt() == num_prompt(thinks=True) < num_prompt(thinks=False)
        with pytest.raises(Exception, match="takes no chat_template from a request"):
            num_prompt(chat_template="x")
