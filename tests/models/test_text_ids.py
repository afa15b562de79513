"""Text in is text out: the ids of a text do not depend on the way it comes in."""

import io
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.byte_fallback import BYTES, SPECIAL, TOKENS, byte_fallback_tokenizer
from helpers.tiny_models import tiny_model
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import kvalign
from kvalign import checkpoints
from kvalign.app.commands.generate import read_prompt
from kvalign.app.serve.prompts import Prompts
from kvalign.app.serve.settings import ServeSettings
from kvalign.data_gen.corpora import token_pieces
from kvalign.methods import make_method
from kvalign.models.input_ids import ids_of, prefix_ids
from kvalign.streaming.turns import Talk

TEXTS = st.text(st.sampled_from("the ern.\n 0é😀'`"), min_size=1, max_size=30)
EXAMPLES = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
AS_IT_IS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def _bytes() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoints.model_path("gpt2-mini"))


def _space_in_front() -> PreTrainedTokenizerBase:
    tokenizer = _bytes()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _metaspace(scheme: str, split: bool) -> PreTrainedTokenizerBase:
    """Words begin with ▁, the first of a text (`first`) or of each part between special tokens
    (`always`), too; `split`: no token has two words.
    """
    tokenizer = byte_fallback_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return tokenizer


def _unigram() -> PreTrainedTokenizerBase:
    pieces = [*SPECIAL, *BYTES, "▁", "▁the", "the", "e", "▁t", "er", "n"]
    scores = [(piece, -1.0 - 0.1 * i) for i, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.ByteFallback(), decoders.Metaspace()]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *parts[:1], decoders.Fuse()])
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def framed(tokenizer: PreTrainedTokenizerBase, form: str) -> PreTrainedTokenizerBase:
    """The tokenizer with special tokens around a text: `B $A E`, with any of the two."""
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    if begin == end:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        begin = "<s>"
    single = form.replace("B", begin).replace("E", end)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[(one, tokenizer.convert_tokens_to_ids(one)) for one in (begin, end)],
    )
    return tokenizer


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "bytes": _bytes,
    "bytes after a begin": lambda: framed(_bytes(), "B $A"),
    "bytes before an end": lambda: framed(_bytes(), "$A E"),
    "bytes, a space in front": lambda: framed(_space_in_front(), "B $A E"),
    "a space in front of each part": lambda: framed(byte_fallback_tokenizer(), "B $A"),
    "words, all with a space": lambda: framed(_metaspace("always", True), "B $A"),
    "words, the first with a space": lambda: framed(_metaspace("first", False), "B $A E"),
    "unigram, before an end": lambda: framed(_unigram(), "$A E"),
}
assert len(TOKENS) > len(BYTES)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def model():
    return tiny_model("gpt2", vocab_size=8200)


def text_of(tokenizer, ids):
    return tokenizer.backend_tokenizer.decode(ids)


def words_of(tokenizer, text):
    """The author's ids of a text, without special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Doors:
    """Ways of a text into a stream."""

    def __init__(self, tokenizer, model, folder):
        self.tokenizer, self.model, self.path = tokenizer, model, folder / "text"

    def argument(self, text):
        return kvalign.stream(self.model, self.tokenizer, text, cache_size=8).ids

    def feed(self, text):
        stream = kvalign.stream(self.model, self.tokenizer, cache_size=8)
        stream.feed(text)
        return stream.ids

    def file(self, text):
        self.path.write_bytes(text.encode())
        return self.argument(read_prompt(None, self.path))

    def file_of_windows(self, text):
        self.path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
        return self.argument(read_prompt(None, self.path))

    def pipe(self, text):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
            return self.argument(read_prompt(None, Path("-")))

    def request(self, text):
        method = make_method("streaming-llm", self.model, cache_size=8)
        prompts = Prompts(self.tokenizer, method, ServeSettings(max_prompt_tokens=100), True)
        return prompts.of(text).tolist()


@EXAMPLES
@given(text=TEXTS)
@pytest.mark.parametrize("door", [name for name in vars(Doors) if not name.startswith("_")])
def test_a_text_that_begins_a_stream(door, text, tokenizer, model, tmp_path):
    if not text.strip():
        text += "t"
    expected = prefix_ids(tokenizer) + words_of(tokenizer, text)
    assert getattr(Doors(tokenizer, model, tmp_path), door)(text) == expected


@EXAMPLES
@given(first=TEXTS, more=st.lists(TEXTS, min_size=1, max_size=3))
@example(first="the", more=["n er", " t"])
def test_a_text_that_goes_on(first, more, tokenizer, model):
    """In the middle of a sentence, or of a word: nothing comes between."""
    stream = kvalign.stream(model, tokenizer, first, cache_size=8)
    begun = text_of(tokenizer, stream.ids)
    for text in more:
        stream.feed(text)
    assert text_of(tokenizer, stream.ids) == begun + "".join(more)
    assert stream.ids[len(prefix_ids(tokenizer)) :][: len(words_of(tokenizer, first))] == (
        words_of(tokenizer, first)
    )


@EXAMPLES
@given(text=TEXTS)
def test_a_text_with_its_special_tokens_gets_no_others(text, tokenizer, model, tmp_path):
    """As a template returns it, and as requests bring it: one begin, and no end."""
    begin = tokenizer.bos_token * bool(prefix_ids(tokenizer))
    stream = kvalign.stream(model, tokenizer, begin + text, cache_size=8)
    assert stream.ids == words_of(tokenizer, begin + text)
    if (begin + text).strip():
        assert Doors(tokenizer, model, tmp_path).request(begin + text) == stream.ids
    ends = {*tokenizer.all_special_ids} - {*prefix_ids(tokenizer)}
    assert not ends & {*stream.ids}


@EXAMPLES
@given(text=TEXTS)
def test_messages(text, tokenizer):
    """A system message, a user's, one after an answer: as the template writes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", AS_IT_IS)
        whole = words_of(tokenizer, f"{text}: er")
        user = {"role": "user", "content": f"{text}: er"}
        parts = [{"role": "system", "content": text}, {"role": "user", "content": ": er"}]
        assert Talk(tokenizer).ids([user], goes_on=False) == whole
        assert Talk(tokenizer).ids(parts, goes_on=False) == whole
        assert Talk(tokenizer, text).ids(parts[1:], goes_on=False) == whole
        after = ids_of(f"{text}: er", tokenizer, prefix=False, goes_on=True)
        assert Talk(tokenizer).ids([user], goes_on=True) == after
        # The same by the copy of the tokenizer that reads special tokens as text.
        masked = ids_of(text, tokenizer, prefix=False, goes_on=True, masks={"\U000fffff": "?"})
        assert masked == ids_of(text, tokenizer, prefix=False, goes_on=True)


def in_one_file(folder, text):
    (folder / "x.txt").write_text(text, newline="")


def in_a_file_of_windows(folder, text):
    (folder / "x.txt").write_text(text, encoding="utf-8-sig", newline="\r\n")


def in_several_files(folder, text):
    """A file ends with a line; whether its last line break is written makes no difference."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        is_last = number == len(lines) - 1
        line = line if is_last or number % 2 or line == "\n" else line.removesuffix("\n")
        (folder / f"{number:03}.txt").write_text(line, newline="")


FORMS = (in_one_file, in_a_file_of_windows, in_several_files)


@EXAMPLES
@given(lines=st.lists(TEXTS, min_size=1, max_size=8), form=st.sampled_from(FORMS))
def test_files(lines, form, tokenizer, tmp_path_factory):
    """Of a corpus, in pieces of some characters."""
    folder, text = tmp_path_factory.mktemp("files"), "\n".join(lines)
    form(folder, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvalign.data_gen.corpus.PIECE_LEN", 5)
        ids = [*chain.from_iterable(token_pieces(f"text:{folder}", tokenizer))]
    assert ids == words_of(tokenizer, text)
