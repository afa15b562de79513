"""Sessions of `kvalign serve` are never lost or mixed in silence: requests without one, turns sent
again, files that are damaged, replaced or written by others.
"""

import copy
import os
import random
import shutil
from dataclasses import replace

import httpx
import pytest
import torch
from helpers.patience import PATIENCE_S
from helpers.served import serving
from helpers.server_kills import attack_sessions

from kvalign.app.serve.service import Service
from kvalign.app.serve.sessions import Sessions, SessionStore
from kvalign.app.serve.settings import ServeSettings
from kvalign.foundation.errors import UserError

MODEL = "llama-mini"


def ask(server, said, session=None, **headers):
    """The reply to messages, or to one turn; headers by their names, with `_`."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    asked = dict(
        model=server.service.settings.model, messages=messages, max_tokens=6, temperature=0
    )
    if session:
        asked["session"] = session
    named = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    address = f"{server.address}/v1/chat/completions"
    return httpx.post(address, json=asked, headers=named, timeout=PATIENCE_S)


def text(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def num_prompt(reply):
    return reply.json()["usage"]["prompt_tokens"]


def num_cached(reply):
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def is_refused(reply, status, code, folder=None):
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code), reply.text
    assert folder is None or str(folder) not in reply.text
    assert "safetensors" not in reply.text


def forget(server, session):
    return httpx.delete(f"{server.address}/v1/sessions/{session}", timeout=PATIENCE_S)


def files(folder):
    return sorted(folder.glob("[!.]*"))


@pytest.mark.slow
def test_sessions_of_other_weights_are_refused(loaded, tmp_path):
    """The embedding is the same, one number of another weight is not."""
    other = copy.deepcopy(loaded.model)
    other.model.layers[1].mlp.down_proj.weight.data[5, 6] += 1
    settings = dict(cache_size=48, sessions=tmp_path)
    with serving(loaded, **settings) as server:
        text(ask(server, "Who?", "a"))
    with pytest.raises(UserError, match="session of another model .*weights of this model differ"):
        Service(ServeSettings(model=MODEL, **settings), replace(loaded, model=other))


@pytest.mark.slow
def test_requests_without_a_session_leave_no_files(loaded, tmp_path):
    talk = [{"role": "user", "content": "Who?"}]
    with serving(loaded, cache_size=48, sessions=tmp_path) as server:
        talk.append({"role": "assistant", "content": text(ask(server, talk))})
        talk.append({"role": "user", "content": "Why?"})
        assert num_cached(ask(server, talk)) > 0, "found by its beginning all the same"
        assert files(tmp_path) == []
        text(ask(server, "Who?", "named"))
        assert len(files(tmp_path)) == 1
    with serving(loaded, cache_size=48, sessions=tmp_path, keep_unnamed=True) as server:
        talk[1]["content"] = text(ask(server, talk[:1]))
        assert len(files(tmp_path)) == 2
    with serving(loaded, cache_size=48, sessions=tmp_path, keep_unnamed=True) as server:
        assert num_cached(ask(server, talk)) > 0
    with serving(loaded, cache_size=48, sessions=tmp_path) as server:
        assert len(server.service.sessions) == 1 and len(files(tmp_path)) == 2
        (note,) = server.service.sessions.store.notes
        assert "1 conversation of requests without a session" in note


def test_a_session_that_had_to_go_says_so(loaded):
    with serving(loaded, cache_size=48, max_sessions=1) as server:
        answer = text(ask(server, "Who?", "a"))
        text(ask(server, "Who?", "b"))
        is_refused(ask(server, "Why?", "a"), 410, "session_dropped")
        whole = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": answer}]
        text(ask(server, [*whole, {"role": "user", "content": "Why?"}], "a"))
        assert num_cached(ask(server, "When?", "a")) > 0, "it is there again"
        is_refused(ask(server, "Why?", "b"), 410, "session_dropped")
        assert forget(server, "b").json()["deleted"]
        assert num_cached(ask(server, "Why?", "b")) == 0


@pytest.mark.parametrize(("name", "has_one"), [("gpt2-mini", True), ("llama-mini", False)])
def test_a_restart_goes_on_with_the_sizes_of_its_sessions(
    name, has_one, minis, tmp_path, monkeypatch
):
    """The default ones follow from the free memory, which changes."""
    seen = []
    for room, memory in ((10**9, None), (4 * 10**9, None), (4 * 10**9, 0), (10**9, None)):
        monkeypatch.setattr("kvalign.streaming.chat.free_bytes", lambda room=room: room)
        with serving(minis[name], memory=memory, sessions=tmp_path / str(len(seen) // 2)) as server:
            text(ask(server, "Who?", "s"))
            seen.append(server.service.method.sizes)
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert [bool(sizes.memory) for sizes in seen[::2]] == [has_one, False]


def test_sessions_in_memory_go_where_room_ends():
    sessions = Sessions(SessionStore(), SessionStore(), 9, 9, max_bytes=1000)
    for i, name in enumerate(("a", "~b", "c", "~d", "e", "f")):
        state = {"x": torch.zeros(100 if i < 5 else 230)}
        sessions.put(replace(sessions.take(name), ids=torch.ones(1), state=state))
        there = [x for x in ("a", "~b", "c", "~d", "e", "f") if x in sessions._by_id]
        assert there == [["a"], ["a", "~b"], ["a", "c"], ["a", "c"], ["c", "e"], ["f"]][i]


def test_a_later_turn_is_answered_again_if_it_says_that_it_is_the_same(loaded):
    with serving(loaded, cache_size=48) as server:
        text(ask(server, "Who?", "s"))
        once = ask(server, "Why?", "s")
        again = ask(server, "Why?", "s", x_stainless_retry_count=1)  # OpenAI's client, by itself
        assert (text(again), num_prompt(again)) == (text(once), num_prompt(once))
        twice = ask(server, "Why?", "s", x_stainless_retry_count=0)
        assert num_prompt(twice) > num_prompt(once), "a turn that is said twice"


def with_one_byte_changed(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda path, older: shutil.copy(older, path),
        lambda path, older: with_one_byte_changed(path),
        lambda path, older: path.unlink(),
    ],
    ids=["an older one", "a byte changed", "removed"],
)
def test_a_file_that_is_changed_while_it_is_served_is_noticed(change, loaded, tmp_path):
    folder, older = tmp_path / "talks", tmp_path / "older"
    with serving(loaded, cache_size=48, sessions=folder) as server:
        text(ask(server, "Who?", "s"))
        (path,) = files(folder)
        shutil.copy(path, older)
        text(ask(server, "Why?", "s"))
        change(path, older)
        left = path.read_bytes() if path.exists() else b""
        for _ in range(2):
            is_refused(ask(server, "When?", "s"), 500, "session_damaged", tmp_path)
        assert (path.read_bytes() if path.exists() else b"") == left
        assert text(ask(server, "Who?", "other"))
        deleted = {"id": "s", "object": "session.deleted", "deleted": True}
        assert forget(server, "s").json() == deleted
        assert num_cached(ask(server, "Who?", "s")) == 0
        assert num_cached(ask(server, "Why?", "s")) > 0


@pytest.mark.slow
def test_a_damaged_file_keeps_nobody_from_starting_and_can_be_reset(loaded, tmp_path, capfd):
    with serving(loaded, cache_size=48, sessions=tmp_path) as server:
        for name in ("a", "b", "c"):
            text(ask(server, f"Who is {name}?", name))
            text(ask(server, "Why?", name))
    paths = {s: server.service.sessions.store._path(s) for s in ("a", "b", "c", "d")}
    with_one_byte_changed(paths["a"])
    shutil.copy(paths["b"], paths["d"])  # one session under two names
    (tmp_path / "notes.safetensors").write_text("nothing")
    with serving(loaded, cache_size=48, sessions=tmp_path) as server:
        said = "\n".join(server.service.sessions.store.notes)
        for name in (paths["a"].name, paths["d"].name, "notes.safetensors"):
            assert name in said
        assert paths["b"].name not in said
        for name in ("a", "d"):
            is_refused(ask(server, "When?", name), 500, "session_damaged", tmp_path)
            assert forget(server, name).status_code == 200
            assert num_cached(ask(server, "When?", name)) == 0
        for name in ("b", "c"):
            assert num_cached(ask(server, "When?", name)) > 0
        assert forget(server, "never").status_code == 404
        assert forget(server, "../notes").status_code == 404
        assert (tmp_path / "notes.safetensors").exists()


@pytest.mark.slow
def test_a_memory_is_in_a_file_of_its_own_that_goes_with_its_session(loaded, tmp_path):
    """A turn appends to it, and writes it not again."""
    how = dict(cache_size=48, memory=300, sessions=tmp_path)
    with serving(loaded, max_sessions=1, **how) as server:
        text(ask(server, "Who?", "s"))
        (path, memory) = files(tmp_path)
        assert memory.name == path.name + ".memory.0"
        before = memory.read_bytes()
        text(ask(server, "Why?", "s"))
        assert memory.read_bytes()[: len(before)] == before != memory.read_bytes()
        assert memory.stat().st_size < len(before) * 3
        expected = ask(server, "When?", "s")
    for change, word in ((with_one_byte_changed, "damaged"), (os.unlink, "missing")):
        shutil.copytree(tmp_path, folder := tmp_path.with_name(word))
        change(folder / memory.name)
        with serving(loaded, **how | {"sessions": folder}) as server:
            assert word in " ".join(server.service.sessions.store.notes)
            is_refused(ask(server, "Why?", "s"), 500, "session_damaged", tmp_path)
            assert forget(server, "s").status_code == 200 and files(folder) == []
    with serving(loaded, max_sessions=1, **how) as server:
        assert num_cached(ask(server, "When?", "s")) > num_cached(expected) > 0
        text(ask(server, "Who?", "other"))
        assert len(files(tmp_path)) == 2, "the first had to go"
        with_one_byte_changed(files(tmp_path)[1])
        is_refused(ask(server, "Why?", "other"), 500, "session_damaged", tmp_path)


def test_an_answer_that_cannot_be_kept_names_no_path(loaded, tmp_path, monkeypatch):
    def full(path, *_):
        raise OSError(f"cannot write {path}: no space left")

    with serving(loaded, cache_size=48, sessions=tmp_path) as server:
        monkeypatch.setattr("kvalign.streaming.stream_file.write", full)
        is_refused(ask(server, "Who?", "s"), 500, "not_kept", tmp_path)
        monkeypatch.undo()
        assert num_cached(ask(server, "Who?", "s")) == 0


@pytest.mark.slow
def test_sessions_survive_kills(tmp_path):
    how = dict(num_sessions=3, memory=500)
    found = attack_sessions(tmp_path / "talks", 1, random.Random(0), **how)
    nothing: dict = {"corrupt": [], "lost": [], "left_over": []}
    assert found == {"command": "serve", "kills": 1, "same_result": True, **nothing}
