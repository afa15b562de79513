"""Texts come back as they are, ids as those of the whole text, errors at once and in one line."""

import hashlib

import pyarrow
import pyarrow.parquet
import pytest
from helpers.hub_cache import put_into_cache
from helpers.hub_data import write_data_set
from helpers.tiny_corpus import TEXT, byte_tokenizer
from tokenizers import Regex, pre_tokenizers

from kvalign.data_gen.corpora import text_sha256, texts, token_pieces
from kvalign.data_gen.python_texts import files_of
from kvalign.foundation.errors import UserError

ODD = "a\r\nb\x0bc\u2028d\x0ce\n\n\nü €\n  f"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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


@pytest.mark.slow
def test_python_source_is_split_by_package():
    packages = {
        split: {name.partition("/")[0].removesuffix(".py") for name in files_of(split)}
        for split in ("train", "test")
    }
    assert {"json", "numpy"} & packages["train"] and not packages["train"] & packages["test"]
    assert len(packages["train"]) > 5 * len(packages["test"]) > 50
    assert not [name for name in files_of("test") if "_vendor" in name or "/tests/" in name]
    for split in packages:
        text = _text("python-source:0.05", split)
        assert len(text) == 50_000 and text.count("def ") > 10
    with pytest.raises(UserError, match="takes a number of megabytes, got 'all'"):
        _text("python-source:all")


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


def test_local_texts_are_told_by_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.txt").write_bytes(b"one\r\n")
    (tmp_path / "two" / "b.txt").write_bytes("zwei é".encode())
    both = hashlib.sha256(b"one\r\n" + "zwei é".encode()).hexdigest()
    found = text_sha256(["marked:text:two", "python-docs", "hub:a/b", "text:two/a.txt"])
    assert found == {"text:two": both, "text:two/a.txt": hashlib.sha256(b"one\r\n").hexdigest()}


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


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_a_data_set_in_the_hubs_cache_is_read_without_a_network(tmp_path, monkeypatch, variable):
    """As it lies there after a download of one config: the card names others, too."""
    cache, own = tmp_path / "hub", tmp_path / "own"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    is_reachable = variable == "HF_DATASETS_OFFLINE"
    monkeypatch.setattr("kvalign.foundation.hub.is_reachable", lambda: is_reachable)
    monkeypatch.setenv(variable, "1")
    splits = {"train": [{"text": " = A = \n"}], "test": [{"text": " = B = \n"}]}
    write_data_set(own, "wikitext-103-raw-v1", splits)
    other = (
        "- config_name: wikitext-2-v1\n  data_files:\n  - split: train\n    path: none/train-*\n"
    )
    (own / "README.md").write_text(
        (own / "README.md").read_text().rstrip("-\n") + f"\n{other}---\n"
    )
    with pytest.raises(UserError, match="hub cannot be reached"):
        _text("paper-wikitext")
    put_into_cache(cache, "Salesforce/wikitext", own, "dataset")
    assert _text("paper-wikitext") == " = A = \n"
    assert _text("paper-wikitext", "test") == " = B = \n"
