"""The `custom_generate` repository of hub/, loaded from its folder as transformers loads it."""

import torch
from helpers.doc_pages import ROOT
from helpers.tiny_models import tiny_model

import kvalign


def test_the_repository_is_stream_generate(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    model, ids = tiny_model("llama"), torch.arange(1, 9)[None]
    settings = dict(cache_size=12, max_new_tokens=30, do_sample=False)
    folder = str(ROOT / "hub" / "kvalign-generate")
    found = model.generate(ids, custom_generate=folder, trust_remote_code=True, **settings)
    wanted = model.generate(ids, custom_generate=kvalign.stream_generate, **settings)
    assert found.shape == (1, 38) and torch.equal(found, wanted)
