"""Which device and dtype a model gets without a flag; `other_device` stands for a GPU. Memory that
cannot be had is said before it is asked for.
"""

import logging
import platform

import psutil
import pytest
import torch
from helpers import other_device

from kvalign.app.commands.generate import GenerateSettings
from kvalign.foundation import machine
from kvalign.foundation.errors import UserError
from kvalign.models import loading, model_folder
from kvalign.models.loading import load_model


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose `auto` is the other device."""
    monkeypatch.setattr(loading, "resolved", lambda x: other_device.NAME if x == "auto" else x)


@pytest.fixture(scope="module")
def in_half(tmp_path_factory):
    """A model that is stored in bfloat16."""
    folder = tmp_path_factory.mktemp("half")
    loaded = load_model("llama-mini", "cpu")
    loaded.model.to(torch.bfloat16).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, torch.bfloat16),
        ({"weights": "auto"}, torch.bfloat16),
        ({"weights": "float32"}, torch.float32),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "float16"}, torch.float16),
        ({"device": "cpu"}, torch.float32),
    ],
    ids=str,
)
def test_a_gpu_gets_the_dtype_of_the_file(gpu, in_half, flags, expected):
    model = load_model(in_half, **{"device": "auto", **flags}).model
    assert model.dtype == expected
    assert model.device.type == flags.get("device", other_device.NAME)


def test_without_a_gpu_nothing_changes(in_half):
    for given in ({}, {"device": "auto"}):
        model = load_model(in_half, **given).model
        assert (model.device.type, model.dtype) == ("cpu", torch.float32)


def test_a_model_that_is_too_large_goes_to_the_cpu(gpu, in_half, monkeypatch, caplog):
    monkeypatch.setattr(loading, "has_room", lambda device, num_bytes: num_bytes < 1000)
    with caplog.at_level(logging.WARNING):
        model = load_model(in_half, "auto").model
    assert model.device.type == "cpu"
    assert "goes to the cpu: the GPU has no" in caplog.text
    assert load_model(in_half, other_device.NAME).model.device.type == other_device.NAME


@pytest.mark.parametrize(
    ("free", "is_auto", "expected"),
    [
        ([200], True, {"": "cuda"}),
        ([50, 100], True, "auto"),
        ([50, 40], True, None),
        ([50, 40], False, {"": "cuda"}),
    ],
)
def test_weights_go_to_gpus_with_room(free, is_auto, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(free))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda i: (free[i if type(i) is int else 0], 0))
    assert loading.device_map_for("large", "cuda", 100, is_auto) == expected
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    assert loading.device_map_for("large", "cuda", 100, is_auto) is None


def test_a_model_that_is_read_to_a_device_is_the_same(in_half):
    config = model_folder.config_of("half", str(in_half))
    of_file = ("half", str(in_half), config, "bfloat16")
    plain, _ = model_folder.read(*of_file)
    mapped, _ = model_folder.read(*of_file, {"": "cpu"})
    assert model_folder.num_weights(config) == mapped.num_parameters()
    for x, y in zip(plain.parameters(), mapped.parameters(), strict=True):
        assert torch.equal(x, y)


def test_a_line_says_what_was_taken(gpu, in_half, capsys):
    GenerateSettings(model=str(in_half)).load()
    line = "device other, weights bfloat16 as in the file (--device cpu, --weights float32)\n"
    assert capsys.readouterr().err == line
    GenerateSettings(model=str(in_half), device="cpu").load()
    assert capsys.readouterr().err == ""


def test_auto_is_cuda_where_torch_sees_one(monkeypatch):
    for is_there, expected in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr("torch.cuda.is_available", lambda is_there=is_there: is_there)
        assert machine.resolved("auto") == expected
    assert machine.resolved("cpu") == "cpu"


def test_what_fits_and_what_does_not(monkeypatch):
    assert machine.free_bytes() > 10**6
    machine.check_room(1, "weights")
    said = r"^weights need 1.0 ZB of memory, but only .* are free$"
    with pytest.raises(UserError, match=said):
        machine.check_room(10**21, "weights")
    monkeypatch.setattr(machine, "free_bytes", lambda: None)  # a system that does not tell
    machine.check_room(10**21, "weights")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is of glibc")
def test_what_lies_between_things_in_use_is_given_back():
    blocks = [b"x" * 100_000 for _ in range(2000)]
    kept = blocks[::20]
    before = psutil.Process().memory_info().rss
    del blocks
    machine.give_back()
    assert before - psutil.Process().memory_info().rss > 100e6 and len(kept) == 100
