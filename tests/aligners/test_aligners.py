"""Aligner folders: exact round trip, refusals that name what is wrong."""

import pytest
import torch
from helpers.hub_cache import COMMIT, put_into_cache
from helpers.methods import network
from huggingface_hub import HfApi, ModelCard, RepoUrl, constants

from kvalign.aligners import Aligner, NetworkAligner
from kvalign.aligners.kinds import label_of, often


@pytest.fixture
def folder(models, tmp_path):
    network(models["gpt2"], train=True).save_pretrained(tmp_path / "aligner")
    return tmp_path / "aligner"


def test_round_trip_is_exact(models, folder):
    saved, loaded = network(models["gpt2"], train=True), Aligner.from_pretrained(folder)
    assert isinstance(loaded, NetworkAligner) and loaded.config == saved.config
    for name, weight in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    again = folder.parent / "again"
    loaded.save_pretrained(again)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_full_disk_leaves_the_aligner_that_was_there(models, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvalign.aligners.base.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        network(models["gpt2"]).save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("training", "label"),
    [
        ({"key": {"used": True}, "value": {"used": True}}, "network"),
        ({"key": {"used": True}, "value": {"used": False}}, "network: keys"),
        ({"key": {"used": False}, "value": {"objective": "rollout"}}, "network-rollout: values"),
        ({"key": {"used": False}, "value": {"used": False}}, "network: nothing"),
        ({"key": {"used": True}}, "network: keys"),
        ({}, "network"),
    ],
)
def test_a_label_says_what_is_corrected(training, label):
    assert label_of("network", training) == label
    assert often(label, 1) == label
    assert often(label, 8).replace("-every-8", "") == label
    assert often("network: keys", 8) == "network-every-8: keys"


def test_other_folders_are_refused(tmp_path, offline):
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        Aligner.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a folder nor on the hub"):
        Aligner.from_pretrained("someone/something")


def test_what_goes_to_the_hub_comes_from_it(models, tmp_path, monkeypatch, offline):
    """With a card that the hub can read; the hub is its cache here."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def create_repo(api, repo_id, **_):
        return RepoUrl(f"{constants.ENDPOINT}/{repo_id}")

    def upload_folder(api, repo_id, folder_path, **_):
        put_into_cache(tmp_path, repo_id, folder_path)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    aligner, name = network(models["gpt2"], train=True), "me/kvalign-distilgpt2-network"
    corpus = ["python-docs", "wikitext", "marked:hub:me/stories:en:text", "text:a.txt"]
    data = {"corpus": corpus, "datasets": ["Salesforce/wikitext"]}
    data |= {"text_sha256": {"text:a.txt": "beef"}}
    part = {"data": data, "val_loss": 0.5, "input_label_mse": 2.0, "ratio": 0.25}
    training = {"key": part, "value": {"data": {"datasets": ["me/stories"]}}}
    changes = {"base_model": "distilbert/distilgpt2", "training": training}
    aligner.config = aligner.config.model_copy(update=changes)
    aligner.push_to_hub(name)
    found = Aligner.from_pretrained(name)
    assert found.config == aligner.config
    for key, weight in aligner.state_dict().items():
        assert torch.equal(found.state_dict()[key], weight)
    card = ModelCard.load(
        tmp_path / "models--me--kvalign-distilgpt2-network/snapshots" / COMMIT / "README.md"
    )
    assert card.data.license == "apache-2.0" and card.data.library_name == "kvalign"
    assert card.data.base_model == "distilbert/distilgpt2"
    assert card.data.datasets == ["Salesforce/wikitext", "me/stories"]
    assert "text_sha256 {'text:a.txt': 'beef'}" in card.text
    assert "| key | 0.5 | 2 | 0.25 | yes |" in card.text
