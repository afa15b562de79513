"""Every form of prompt comes back as turns; what is none is named with its line."""

import json

import pytest
from helpers.hub_data import write_data_set

from kvalign.data_gen.corpus import MT_BENCH, conversations
from kvalign.foundation.errors import UserError


def test_our_own_are_different_and_have_two_turns(offline):
    own = conversations("own")
    assert [len(turns) for turns in own] == [2] * 4
    assert len({turn for turns in own for turn in turns}) == 8
    own[0].clear()
    assert len(conversations("own")[0]) == 2, "a caller's list is the caller's"


def test_files_hold_turns_or_a_prompt(tmp_path):
    path = tmp_path / "some.jsonl"
    rows = [
        {"question_id": 81, "turns": ["One\u2028line", "Two"], "prompt": "not this"},
        {"prompt": "Three"},
        {"prompt": ["Four", "Five"], "reference": []},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    expected = [["One\u2028line", "Two"], ["Three"], ["Four", "Five"]]
    for text in ("\n".join(lines), "\r\n\r\n".join(lines) + "\r\n", "\ufeff" + lines[0]):
        path.write_bytes(text.encode())
        assert conversations(str(path)) == expected[: text.count("{")]


NEEDED = r'needs "turns" \(a list of texts\) or "prompt" \(a text or a list of them\), got '
BAD = [
    (b'{"prompt": "\xff"}', "is not UTF-8 text: 'utf-8' codec can't decode"),
    ('{"turns": "x"}', NEEDED + "'x'"),
    ('{"turns": ["x", " "]}', NEEDED + r"\['x', ' '\]"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[str(line)[:30] for line, _ in BAD])
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"prompt": "good"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"bad\.jsonl:3 {message}") as caught:
        conversations(str(path))
    assert "\n" not in str(caught.value)


def test_mt_bench_is_read_from_a_copy(offline, tmp_path, monkeypatch):
    rows = [{"prompt": ["One", "Two"], "category": "math"}, {"prompt": ["Three"], "category": ""}]
    write_data_set(tmp_path / MT_BENCH, "default", {"train": rows})
    monkeypatch.chdir(tmp_path)
    assert conversations("mt-bench") == [["One", "Two"], ["Three"]]


def test_no_network_is_said_at_once_with_what_works(offline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"hub cannot be reached; .* offline: own, PATH\.jsonl$"):
        conversations("mt-bench")
    (tmp_path / MT_BENCH).mkdir(parents=True)
    with pytest.raises(UserError, match=f"cannot load 'train' of '{MT_BENCH}': .*; prompts that"):
        conversations("mt-bench")
