"""Texts come back as they are, ids as those of the whole text, errors at once and in one line."""

import hashlib
import json
import sys

import pyarrow
import pyarrow.parquet
import pytest
from helpers.hub_data import write_data_set
from helpers.tiny_corpus import TEXT, byte_tokenizer
from tokenizers import Regex, pre_tokenizers

from kvalign.data_gen import marked
from kvalign.data_gen.corpora import hub_datasets, text_sha256, texts, token_pieces
from kvalign.data_gen.python_docs import python_docs
from kvalign.foundation.errors import UserError

ODD = "a\r\nb\x0bc\u2028d\x0ce\n\n\nü €\n  f"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("kvalign.foundation.hub.is_reachable", lambda: False)


def _text(spec: str, split: str = "train") -> str:
    return "".join(texts(spec, split))


@pytest.mark.parametrize("name", ["a.txt", "b[1].txt", "c*.txt", "d e.txt", ".f.txt", "g.md"])
def test_text_is_that_of_the_file(tmp_path, name):
    (tmp_path / name).write_bytes(ODD.encode())
    (tmp_path / "c_other.txt").write_text("another text")
    expected = ODD.replace("\r\n", "\n")  # as Python reads text
    assert _text(f"text:{tmp_path / name}") == _text(f"text:{tmp_path / name}", "test") == expected


def test_folders_and_globs_are_read_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in (
        ("b.txt", "2\n"),
        ("a.txt", "1\n"),
        ("sub/c.txt", "4\n"),
        ("sub-a.txt", "3\n"),
        ("d.md", "5\n"),
    ):
        (tmp_path / name).write_text(text)
    assert _text(f"text:{tmp_path}") == "1\n2\n3\n4\n"
    assert _text(f"text:{tmp_path}/*") == "1\n2\n5\n3\n"
    with pytest.raises(
        FileNotFoundError, match=r"no text at '.*nothing\.txt': name a file, a folder"
    ):
        _text(f"text:{tmp_path}/nothing.txt")


@pytest.mark.parametrize("piece_len", [1, 10, 300, 5000])
@pytest.mark.parametrize("pattern", [None, LLAMA3])
def test_ids_are_those_of_the_whole_text(monkeypatch, tmp_path, piece_len, pattern):
    """Wherever a piece ends: among blank lines, before an indent, after punctuation."""
    text = TEXT + "x!\n/y\n\n\n  z\n \n\n= t =\n \n a \n b\n\n\nc\n'd\n\u0301e\n" + TEXT[:500]
    split = pattern and pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer = byte_tokenizer(600, text * 2, split)
    (tmp_path / "x.txt").write_text(text)
    monkeypatch.setattr("kvalign.data_gen.corpus.PIECE_LEN", piece_len)
    pieces = list(token_pieces(f"text:{tmp_path}/x.txt", tokenizer))
    assert (len(pieces) > 100) == (piece_len < 100)
    assert [i for piece in pieces for i in piece] == tokenizer(text)["input_ids"]


@pytest.mark.slow
def test_python_docs_are_split_by_document():
    names = {split: [row["name"] for row in python_docs(split)] for split in ("train", "test")}
    assert set(names["train"]).isdisjoint(names["test"])
    assert 0.05 < len(names["test"]) / len(names["train"]) < 0.2
    assert next(texts("python-docs", "test")).startswith(next(python_docs("test"))["text"])
    assert "module/argparse.py" in names["train"] + names["test"]


def test_marked_text_is_wikitexts(tmp_path):
    (tmp_path / "x.txt").write_text("It's a two-part 1,000.5 “word”.\n\nNext\n")
    assert _text(f"marked:text:{tmp_path}/x.txt") == (
        ' It \'s a two @-@ part 1 @,@ 000 @.@ 5 " word " . \n \n Next \n '
    )


def _write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_hub_data_sets_are_read_from_local_folders(offline, tmp_path):
    folder = tmp_path / "set"
    for split, text in (("train", "one"), ("test", "two")):
        rows = [
            {"text": text, "page": f"{text} page", "number": 1},
            {"text": "", "page": "", "number": 2},
        ]
        _write_parquet(folder / f"{split}-00000-of-00001.parquet", rows)
    assert _text(f"hub:{folder}") == "one\n\n\n\n"
    assert _text(f"hub:{folder}:default", "test") == "two\n\n\n\n"
    assert _text(f"hub:{folder}::page") == "one page\n\n\n\n"
    with pytest.raises(UserError, match="no column 'body': this data set has text, page, number"):
        _text(f"hub:{folder}::body")
    with pytest.raises(UserError, match="column 'number' holds int, not text"):
        _text(f"hub:{folder}::number")
    with pytest.raises(UserError, match=r"cannot load 'train' of .*'nope' not found"):
        _text(f"hub:{folder}:nope")
    with pytest.raises(
        UserError, match=r"a hub data set is hub:NAME\[:CONFIG\]\[:COLUMN\], got 'hub:a:b:c:d'"
    ):
        _text("hub:a:b:c:d")


def test_json_lines_without_a_test_split(offline, tmp_path):
    lines = [json.dumps({"text": f"row {i}\n"}) for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert _text(f"hub:{tmp_path}") == "row 0\n\nrow 1\n\nrow 2\n\n"
    with pytest.raises(UserError, match=r"cannot load 'test' of .*Available splits"):
        _text(f"hub:{tmp_path}", "test")


@pytest.mark.parametrize("spec", ["wikitext", "everyday", "hub:some/set", "marked:wikitext"])
def test_no_network_is_said_at_once_with_what_works(offline, spec):
    with pytest.raises(
        UserError, match="hub cannot be reached; corpora that work offline: python-docs, text:PATH"
    ):
        texts(spec)


def test_unknown_corpora_and_splits_are_refused():
    with pytest.raises(UserError, match="unknown corpus 'wikitxt'; did you mean wikitext"):
        texts("wikitxt")
    with pytest.raises(UserError, match="split must be train or test, got 'val'"):
        texts("python-docs", "val")


@pytest.mark.parametrize(
    "spec", ["", "text:", "hub:", "marked:", "python-docs:x", "wikitext:", ":x"]
)
def test_specifications_without_what_they_need_are_unknown(spec):
    with pytest.raises(UserError, match="unknown corpus"):
        texts(spec)


def test_files_that_cannot_be_read_are_named(offline, tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.txt is not UTF-8 text: .*0xe9"):
        _text(f"text:{tmp_path}/latin.txt")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train-00000.parquet").write_bytes(b"PAR1 not parquet")
    with pytest.raises(UserError, match=r"cannot (load|read) 'train' of '.*set'") as caught:
        _text(f"hub:{folder}")
    assert "\n" not in str(caught.value)


def test_hub_data_sets_among_corpora_have_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local" / "set").mkdir(parents=True)
    specs = ["marked:wikitext", "wikitext", "hub:a/b:config:column", "hub:local/set", "hub:c"]
    others = ["python-docs", "text:wikitext", f"hub:{tmp_path}", "hub:../x/y", "hub:"]
    assert hub_datasets([*specs, *others]) == ["Salesforce/wikitext", "a/b", "c"]
    assert hub_datasets([]) == []


def test_local_texts_are_told_by_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.txt").write_bytes(b"one\r\n")
    (tmp_path / "two" / "b.txt").write_bytes("zwei é".encode())
    both = hashlib.sha256(b"one\r\n" + "zwei é".encode()).hexdigest()
    found = text_sha256(["marked:text:two", "python-docs", "hub:a/b", "text:two/a.txt"])
    assert found == {"text:two": both, "text:two/a.txt": hashlib.sha256(b"one\r\n").hexdigest()}


def test_marked_text_without_its_tokenizer_says_what_to_install(monkeypatch, tmp_path):
    marked._moses.cache_clear()
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(UserError, match=r"needs sacremoses \(pip install 'kvalign\[pretrain\]'\)"):
        _text(f"marked:text:{tmp_path}/x.txt")


@pytest.mark.slow
def test_named_hub_corpora_are_read_from_a_copy(offline, tmp_path, monkeypatch):
    """In the hub's layout: WikiText's configs in the card, conversations as lists of turns."""
    splits = {"train": [{"text": " = A = \n"}], "test": [{"text": " = B = \n"}]}
    write_data_set(tmp_path / "Salesforce" / "wikitext", "wikitext-103-raw-v1", splits)
    turns = [{"content": "Hi", "role": "user"}, {"content": "Hello!", "role": "assistant"}]
    everyday = tmp_path / "HuggingFaceTB" / "everyday-conversations-llama3.1-2k" / "data"
    for split in ("train_sft", "test_sft"):
        _write_parquet(everyday / f"{split}-00000-of-00001.parquet", [{"messages": turns}])
    talk = {"train": [{"messages": turns}] * 2}
    write_data_set(tmp_path / "HuggingFaceTB" / "smoltalk", "everyday-conversations", talk)
    monkeypatch.chdir(tmp_path)
    assert _text("paper-wikitext") == " = A = \n"
    assert _text("paper-wikitext", "test") == " = B = \n"
    assert _text("paper-everyday") == _text("paper-everyday", "test") == "Hi Hello! Hi Hello! "
    assert _text("wikitext") == " = A = \n\n"
    assert _text("wikitext", "test") == " = B = \n\n"
    assert _text("everyday", "test") == "Hi\nHello!\n\n"
