"""Which name is meant by one that is nearly right."""

import pydoc
from typing import TypedDict, Unpack

import pytest

import kvalign
from kvalign.foundation.errors import KeywordError
from kvalign.foundation.names import check_keywords, nearest, spelled_out

KNOWN = ["max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "cache_size", "seed"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokens", "max_new_tokens"),
        ("max_length", "max_new_tokens"),
        ("topk", "top_k"),
        ("greedy", "do_sample"),
        ("window", "cache_size"),
        ("temprature", "temperature"),
        ("sampling_seed", "seed"),
        ("num_beams", None),
        ("streamer", None),
        ("batch_size", None),
        ("ignore_eos", None),
        ("xyzzy", None),
    ],
)
def test_other_programs_names_and_misspellings(name, meant):
    assert nearest(name, KNOWN) == meant


def test_an_alias_of_what_is_not_there_is_no_answer():
    assert nearest("greedy", ["cache_size"]) is None
    assert nearest("ignore_eos", ["stop_at_end", "no_stop_at_end"]) == "no_stop_at_end"
    assert nearest("num_beams", ["num_sinks", "num_tokens"]) is None
    assert nearest("greedy", ["no_do_sample", "do_sample"]) == "no_do_sample"


def test_a_signature_is_readable_and_names_every_setting():
    own = pydoc.plain(pydoc.render_doc(kvalign.stream)).splitlines()[2]
    assert "temperature: float = ..., top_k: int = ..., top_p" in own
    assert own.count("**config: StreamConfig)") == 1 and "ForwardRef" not in own


def test_a_wrong_keyword_is_both_a_type_error_and_a_users():
    class Config(TypedDict):
        seed: int

    @spelled_out(Config)
    def ours(model, *, cache_size=4, **config: Unpack[Config]):
        return model, cache_size, config

    check_keywords(ours, ["cache_size", "seed"])
    for kind in (KeywordError, TypeError, ValueError):
        with pytest.raises(kind, match=r"ours\(\) has no keyword 'rng': did you mean seed\?"):
            check_keywords(ours, ["rng"])
    with pytest.raises(KeywordError, match=r"'qqq': it has model, cache_size, seed$"):
        check_keywords(ours, ["qqq"])
