"""Edits of `kvalign serve --edit` that are disturbed: by a client that leaves, other requests, a
kill. Nothing is lost, and no answer comes from a state that is half edited.
"""

import queue
import shutil

import pytest
import torch
from helpers.edited_talks import ASKED, TALK, edited, more
from helpers.patience import PATIENCE_S, until
from helpers.served import running

from kvalign.app.serve.errors import RequestError
from kvalign.app.serve.prompts import Change
from kvalign.app.serve.turn import AnswerPiece, End, SessionUpdate, Turn
from kvalign.app.serve.wire import ChatRequest
from kvalign.methods import make_method

EDIT = dict(cache_size=250, edit=True, method="streaming-llm")


def begun(service, messages):
    """A request whose answer has begun, and the queue of what comes."""
    asked = ChatRequest.model_validate({**ASKED, "messages": messages})
    events = queue.SimpleQueue()
    return service.chat(asked, events.put), events


def ended(answers, events):
    """Text of an answer, and tokens that were edited."""
    text = ""
    while not isinstance(event := events.get(timeout=PATIENCE_S), End):
        if isinstance(event, RequestError):
            raise event
        assert isinstance(event, AnswerPiece)
        text += event.text
    return text, answers.num_edited


def said(service, messages):
    return ended(*begun(service, messages))


def talk(service):
    messages = []
    for text in TALK:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": said(service, messages)[0]})
    return messages


@pytest.fixture(scope="module")
def undisturbed(loaded):
    """What is answered when nothing happens: the talk, its next turn, and the edited one."""
    with running(loaded, **EDIT) as service:
        messages = talk(service)
        changed = said(service, edited(messages))
        after = said(service, more(messages))[0]
        assert changed[1] > 0 and after != changed[0]
        return messages, after, changed


def snapshot(service):
    """Sessions and bits of their states."""
    there = service.sessions._by_id.values()
    return [(one.id, {name: x.clone() for name, x in one.state.items()}) for one in there]


def same(one, other):
    assert [name for name, _ in one] == [name for name, _ in other]
    for (_, a), (_, b) in zip(one, other, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[x], b[x]) for x in a)


def check_as_undisturbed(service, messages, expected):
    """All goes on: the edited talk, and then the one that it was made from."""
    _, after, changed = expected
    assert said(service, edited(messages)) == changed
    assert said(service, more(messages))[0] == after


@pytest.mark.parametrize("at", ["before it", "between two changes", "after it", "at the end"])
def test_a_client_that_leaves_changes_nothing(at, loaded, undisturbed, monkeypatch):
    gone, made, kept = [], [], []
    change, ends = Turn.change, SessionUpdate.ended

    def leaving(turn, most):
        if at == "before it":
            gone[0].cancel()
        made.append(change(turn, most))
        if at == "between two changes" or (at == "after it" and not turn.changes):
            gone[0].cancel()
        return made[-1]

    def ending(update, row, state):
        kept.append(at == "at the end" and gone[0].cancel())
        ends(update, row, state)

    with running(loaded, **EDIT) as service:
        messages = talk(service)
        before = snapshot(service)
        with monkeypatch.context() as patch:
            patch.setattr(Turn, "change", leaving)
            patch.setattr(SessionUpdate, "ended", ending)
            with service.engine._wakes:  # nothing is fed before its answers are known
                answers, _ = begun(service, edited(messages))
                gone.append(answers)
            until(lambda: made and not service.engine.num_rows and not service.sessions._busy)
        assert len(made) > 1 or at in ("before it", "between two changes")
        assert bool(kept) == (at == "at the end")
        same(before, snapshot(service))
        check_as_undisturbed(service, messages, undisturbed)


def test_what_a_kill_leaves_goes_on(loaded, undisturbed, tmp_path, monkeypatch):
    """The folder as it is in the middle of an edit, and just before its answer is stored."""
    folder, change, keep = tmp_path / "talks", Turn.change, SessionUpdate._keep
    copies = []

    def copied():
        copies.append(shutil.copytree(folder, tmp_path / f"killed{len(copies)}"))

    def changing(turn, most):
        copied()
        return change(turn, most)

    def keeping(update, row, state):
        copied()
        keep(update, row, state)

    stored = dict(**EDIT, keep_unnamed=True)
    with running(loaded, sessions=folder, **stored) as service:
        messages = talk(service)
        monkeypatch.setattr(Turn, "change", changing)
        monkeypatch.setattr(SessionUpdate, "_keep", keeping)
        assert said(service, edited(messages)) == undisturbed[2]
        monkeypatch.undo()
        names = {path.name for path in folder.glob("*.safetensors")}
    assert len(names) == 2 and len(copies) > 2
    for copy in (*copies, folder):
        num = len({path.name for path in copy.glob("*.safetensors")} & names)
        assert num == (2 if copy == folder else 1)
        with running(loaded, sessions=copy, **stored) as service:
            assert len(service.sessions) == num and not service.sessions.store.notes
            if copy == folder:  # the edited talk was stored, and is told again
                assert said(service, edited(messages)) == (undisturbed[2][0], 0)
            else:
                check_as_undisturbed(service, messages, undisturbed)


def of_ids(loaded, ids, cache_size=60):
    method = make_method("streaming-llm", loaded.model, cache_size=cache_size, num_sinks=4)
    method.reset()
    method.feed(ids)
    return method


def turn_of(method, ids, changes):
    return Turn(method.new(), method.state(), ids, [], lambda _: None, changes=changes)


@torch.no_grad()
def test_changes_in_parts_are_the_changes(loaded):
    ids = torch.arange(100, 140)[None]
    changes = [Change(6, 8, []), Change(12, 12, [7, 8, 9]), Change(20, 30, [5])]
    turn = turn_of(of_ids(loaded, ids), ids[0, :1], [*changes])
    turn.restore()
    num_fed = []
    while turn.changes:
        num_fed.append(turn.change(2))
    assert num_fed == [1, 2, 1, 0]
    whole = [*range(100, 106), *range(108, 112), 7, 8, 9, *range(112, 120), 5, *range(130, 140)]
    assert turn.method.num_tokens == len(whole)
    fresh = of_ids(loaded, torch.tensor([whole]))
    assert turn.method.cache.index().tolist() == fresh.cache.index().tolist()
    last = torch.tensor([[3]])
    close = torch.cosine_similarity(turn.method.feed(last), fresh.feed(last))
    assert close > 0.98
