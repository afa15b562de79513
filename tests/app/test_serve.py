"""`kvalign serve` through OpenAI's client: the interface, sessions, rows that come and go."""

import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import openai
import pytest
from helpers.byte_fallback import byte_fallback_model
from helpers.patience import PATIENCE_S, until
from helpers.served import serving
from helpers.smaller import example

import kvalign
from kvalign.app.cli.main import main
from kvalign.app.serve.service import Service
from kvalign.app.serve.settings import ServeSettings
from kvalign.foundation.errors import UserError
from kvalign.streaming.turns import Talk

GREEDY = dict(temperature=0, max_tokens=12)
SERVED = dict(cache_size=48, max_streams=8, method="streaming-llm")


def say(client, text, session=None, **more):
    given = {**GREEDY, **more}
    if session:
        given["extra_body"] = {"session": session}
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return client.chat.completions.create(model="gpt2-mini", messages=messages, **given)


def content(reply):
    return reply.choices[0].message.content


def test_several_prompts_and_answers(client):
    asked = dict(model="gpt2-mini", max_tokens=6, seed=5, temperature=1)
    several = client.completions.create(prompt=["The king", "In the year"], n=2, **asked).choices
    alone = client.completions.create(prompt="In the year", n=2, **asked).choices
    assert [choice.index for choice in several] == [0, 1, 2, 3]
    assert [choice.text for choice in several[2:]] == [choice.text for choice in alone]
    assert alone[0].text != alone[1].text
    other = client.completions.create(prompt="In the year", **asked | {"seed": 6}).choices
    assert other[0].text != alone[0].text


@pytest.mark.slow
def test_what_an_answer_repeats_may_be_looked_up(client, loaded):
    """Answers are the same, alone and beside others, in sessions that go on."""
    asked = dict(max_tokens=24, temperature=0)
    prompts = ["The king. The king. The", "In the year"]
    with serving(loaded, lookup=8, **SERVED) as one, one.client() as other:
        for turn in ("Who? Who?", "And the other? Who?"):
            texts = [content(say(x, turn, "talk-looked-up", **asked)) for x in (client, other)]
            assert texts[0] == texts[1] != ""
        several, alone = (
            x.completions.create(model="gpt2-mini", prompt=prompts, **asked).choices
            for x in (client, other)
        )
        assert [choice.text for choice in several] == [choice.text for choice in alone]


def test_stop_strings_are_not_shown(client):
    asked = dict(model="gpt2-mini", prompt="The history of the", temperature=0, max_tokens=30)
    text = client.completions.create(**asked).choices[0].text
    stop = text[20:26]
    choice = client.completions.create(**asked, stop=[stop, "never"]).choices[0]
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"
    chunks = client.completions.create(**asked, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_a_stop_string_may_be_a_special_token():
    """Which no text shows: here, and in a stream of the same tokens."""
    loaded = byte_fallback_model()
    how = dict(cache_size=24, method="streaming-llm", stop_at_end=False)
    tokenizer, prompt = loaded.tokenizer, "hello"
    free = dict(seed=12, top_k=0, max_new_tokens=60, **how)
    stream = kvalign.stream(loaded.model, tokenizer, prompt, **free)
    whole = "".join(stream)
    number = stream.token_ids.index(tokenizer.eos_token_id)
    end = tokenizer.eos_token
    stopped = kvalign.stream(loaded.model, tokenizer, prompt, stop_strings=end, **free)
    text = "".join(stopped)
    assert stopped.token_ids == stream.token_ids[: number + 1] and stopped.has_ended
    assert whole.startswith(text) and end not in text
    with serving(loaded, **how) as server, server.client() as client:
        asked = dict(model="tiny", prompt=prompt, max_tokens=60, seed=12, temperature=1, top_p=1)
        choice = client.completions.create(**asked, stop=end, extra_body={"top_k": 0}).choices[0]
    assert choice.text == text and choice.finish_reason == "stop"


def test_all_messages_go_on_with_a_session_that_a_header_may_name(client):
    messages = [{"role": "user", "content": "Who?"}]
    messages.append({"role": "assistant", "content": content(say(client, messages, "whole"))})
    more = [*messages, {"role": "user", "content": "Where?"}]
    assert content(say(client, more, "whole")) == content(say(client, more))
    asked = dict(model="gpt2-mini", messages=[{"role": "user", "content": "So?"}], **GREEDY)
    how = dict(headers={"X-Session-Id": "whole"}, timeout=PATIENCE_S)
    header = httpx.post(f"{client.base_url}chat/completions", json=asked, **how)
    assert header.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    with pytest.raises(openai.BadRequestError, match="do not continue"):
        say(client, [*messages[:1], {"role": "assistant", "content": "no"}, messages[0]], "whole")


def test_the_system_prompt_stays(client, server, loaded):
    system, turns = "You know all islands.", ("Who?", "Why?", "When?")
    for turn in turns:
        told = [{"role": "system", "content": system}]
        reply = say(client, [*told, {"role": "user", "content": turn}], "told", max_tokens=20)
    assert reply.usage.total_tokens > 48
    session = server.service.sessions.take("told")
    server.service.sessions.release(session)
    num = Talk(loaded.tokenizer, system).opening_len()
    assert session.num_sinks == num
    method = server.service._method_for(num)
    method.restore(session.state)
    assert method.cache.index()[:num].tolist() == list(range(num))
    too_long = [{"role": "system", "content": "word " * 50}, {"role": "user", "content": "a"}]
    with pytest.raises(openai.BadRequestError, match="takes"):
        say(client, too_long)


def test_a_client_that_leaves_frees_its_row(client, server):
    engine, sessions = server.service.engine, server.service.sessions
    say(client, "Who?", "left")
    stream = say(client, "Why?", "left", stream=True, max_tokens=2000)
    next(stream)
    until(lambda: engine.num_rows == 1)
    with pytest.raises(openai.ConflictError, match="answering another turn"):
        say(client, "When?", "left")
    stream.close()
    until(lambda: engine.num_rows == 0)
    expected = [content(say(client, turn, "stayed")) for turn in ("Who?", "When?")]
    assert content(say(client, "When?", "left")) == expected[1]  # as if nothing had been asked
    asked = dict(model="gpt2-mini", prompt="A", max_tokens=2000)
    brief = httpx.Timeout(PATIENCE_S, read=0.3)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.address}/v1/completions", json=asked, timeout=brief)
    until(lambda: engine.num_rows == 0)
    assert not sessions._busy


def test_a_full_queue_is_429_and_others_go_on(loaded):
    with (
        serving(loaded, cache_size=48, max_streams=1, max_queue=1) as server,
        server.client() as client,
    ):
        first = say(client, "Who?", stream=True, max_tokens=2000)
        next(first)  # it may wait itself as it begins
        until(lambda: server.service.engine.num_rows == 1)
        answers = []
        second = threading.Thread(target=lambda: answers.append(content(say(client, "Why?"))))
        second.start()
        until(lambda: server.service.engine.num_waiting == 1)
        with pytest.raises(openai.RateLimitError, match="are waiting"):
            say(client, "When?")
        first.close()
        second.join()
        assert answers == [content(say(client, "Why?"))]


@pytest.mark.slow
def test_a_folder_of_sessions_is_of_streams_of_one_size(loaded, tmp_path):
    with serving(loaded, cache_size=48, sessions=tmp_path) as server, server.client() as client:
        messages = [{"role": role, "content": "You know islands."} for role in ("system", "user")]
        said = content(say(client, messages, "kept"))
        (path,) = tmp_path.glob("[!.]*")
        stream = kvalign.load_stream(path, loaded.model, loaded.tokenizer)
        assert stream.text == said and stream.notes["system"] == "You know islands."
        say(client, "Who?", "other")
    other = ServeSettings(model="gpt2-mini", cache_size=40, sessions=tmp_path)
    with pytest.raises(UserError, match="of another method or size"):
        Service(other, loaded)
    few = ServeSettings(model="gpt2-mini", cache_size=48, sessions=tmp_path, max_sessions=1)
    with pytest.raises(UserError, match="--max-sessions must be at least 2"):
        Service(few, loaded)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--host", "0.0.0.0", "--api-key", "secret"], "secret"),
        (["--host", "0.0.0.0"], "of the environment"),
        (["--host", "0.0.0.0", "--without-key"], None),
        (["--host", "::1"], None),
        (["--host", "localhost"], None),
    ],
)
def test_who_is_let_in(flags, key, monkeypatch):
    served = []
    listening = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr("kvalign.app.commands.serve.listening", lambda *_: listening)
    monkeypatch.setattr(ServeSettings, "load", lambda settings: None)
    monkeypatch.setattr("kvalign.app.serve.server.build", lambda *_: None)
    monkeypatch.setattr("kvalign.app.serve.server.serve", lambda *given: served.append(given[0]))
    monkeypatch.delenv("KVALIGN_API_KEY", raising=False)
    if key == "of the environment":
        monkeypatch.setenv("KVALIGN_API_KEY", key)
    assert main(["serve", "--model", "gpt2-mini", *flags]) == 0
    assert [settings.api_key for settings in served] == [key]


@pytest.mark.slow
def test_the_example_serves_until_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "kvalign", *example("serve"), "--port", "0"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = re.search(r"http\S+", process.stdout.readline())[0]
        with openai.OpenAI(base_url=address, api_key="none", max_retries=8) as client:
            pieces = say(client, "Who?", "one", stream=True, max_tokens=2000)
            next(pieces)
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError):
                list(pieces)
        assert process.wait(PATIENCE_S) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
