"""A tokenizer out of a GGUF file gives llama.cpp's tokens, or a line names what is not read."""

import json

import pytest
from helpers.tiny_gguf import TOKENIZER, TOKENS, readers, write_gguf
from helpers.tiny_models import tiny_model
from scripts.llamacpp_tokens import (
    CASES,
    CONTROL,
    FILE,
    SHOWN,
    TEXTS,
    merges_of,
    of_bytes,
    of_scores,
    write_case,
)
from transformers import AutoTokenizer

from kvalign import load_model
from kvalign.foundation.errors import UserError
from kvalign.models.gguf import SPLITS, tokenizer_of_gguf
from kvalign.models.input_ids import ids_of, prefix_ids, unknown_ids
from kvalign.streaming.answer import special_names, token_bytes
from kvalign.streaming.turns import end_ids

readers()
RECORDED = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_llama_cpp_s(name, tmp_path):
    """As recorded from it; from the file, and from a folder that was saved of it."""
    write_case(tmp_path / "tiny.gguf", name)
    made = tokenizer_of_gguf(tmp_path / "tiny.gguf")
    made.save_pretrained(tmp_path / "saved")
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        for text, alone, begun in zip(TEXTS, *RECORDED[name].values(), strict=True):
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == alone, text
            assert tokenizer(text)["input_ids"] == begun, text


def test_all_expressions_are_tried():
    tried = [SPLITS[name] for name in CASES if name in SPLITS]
    assert all(pre in tried for pre in SPLITS.values())


def test_what_is_shown_and_what_is_not(tmp_path):
    write_case(tmp_path / "tiny.gguf", "qwen2")
    tokenizer = tokenizer_of_gguf(tmp_path / "tiny.gguf")
    assert {*special_names(tokenizer).values()} == {*CONTROL}
    ids = ids_of("a<tool_call>b<|im_end|>", tokenizer, prefix=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool_call>b"
    size = len(CASES["qwen2"]["tokens"])
    assert unknown_ids(tokenizer, size) == [size - 3, size - 2, size - 1], "those that fill it up"
    assert [token_bytes(tokenizer, i) for i in range(4)] == [x.encode() for x in CONTROL]
    assert SHOWN[0].encode() in [token_bytes(tokenizer, i) for i in ids]


def test_tokens_that_end_a_turn_or_a_message_end_an_answer(tmp_path):
    settings = TOKENIZER | {"eot_token_id": 0, "eom_token_id": TOKENS.index("the")}
    model = tiny_model("llama", vocab_size=len(TOKENS), tie_word_embeddings=True)
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer=settings)
    loaded = load_model(tmp_path / "tiny.gguf")
    assert end_ids(loaded.model, loaded.tokenizer) == [0, 2, TOKENS.index("the")]
    assert prefix_ids(loaded.tokenizer) == []


def test_what_has_no_order_of_its_own_is_warned_of(tmp_path, caplog):
    settings = of_scores()
    path, number = tmp_path / "tiny.gguf", settings["tokens"].index("".join(merges_of("▁")[3]))
    for score, num in ((settings["scores"][number], 0), (settings["scores"][number + 1], 1)):
        settings["scores"][number] = score
        shape = dict(vocab_size=len(settings["tokens"]), tie_word_embeddings=True)
        write_gguf(path, tiny_model("llama", **shape), tokenizer=settings)
        tokenizer_of_gguf(path)
        assert len(caplog.messages) == num, caplog.messages


def without(settings, *names):
    return {name: value for name, value in settings.items() if name not in names}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *(
            (
                of_bytes("gpt-2") | {"model": kind},
                f"its tokenizer.ggml.model is '{kind}': llama and g",
            )
            for kind in ("bert", "t5", "rwkv", "plamo2", "no_vocab")
        ),
        (without(of_bytes("gpt-2"), "model"), "its tokenizer.ggml.model is None"),
        (of_bytes("kimi-k2"), "its tokenizer.ggml.pre is 'kimi-k2', which is not read"),
        (of_bytes("gpt-2", suppress_tokens=[1]), "its setting tokenizer.ggml.suppress_tok"),
        (without(of_bytes("gpt-2"), "merges"), "it has no tokenizer.ggml.merges"),
        (without(of_scores(), "scores"), "it has no tokenizer.ggml.scores"),
        (of_scores(scores=[0.0] * 9), r"its tokenizer.ggml.scores has 9 of \d+ tokens"),
        (of_scores(token_type=[1] * 9), r"its tokenizer.ggml.token_type has 9 of \d+ tokens"),
        (of_bytes("gpt-2", eos_token_id=5000), r"tokenizer.ggml.eos_token_id is 5000, but it"),
        (without(of_bytes("llama-bpe"), "bos_token_id"), "no tokenizer.ggml.bos_token_id"),
        (of_bytes("gpt-2", tokens=["a", "b", "a"]), "its tokenizer.ggml.tokens has 'a' twice"),
        (of_bytes("gpt-2", merges=["x yz"]), "out of vocabulary"),
    ],
)
def test_what_is_not_read_is_refused_by_name(settings, said, tmp_path):
    shape = dict(vocab_size=len(settings["tokens"]), tie_word_embeddings=True)
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", **shape), tokenizer=settings)
    with pytest.raises(UserError, match=f"^cannot read the GGUF file '.*': .*{said}") as refused:
        load_model(tmp_path / "tiny.gguf")
    assert "\n" not in str(refused.value)
