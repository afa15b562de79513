"""Changes of weights: functions from tensors by name to others, or to the bytes of a file."""

import json
import struct

import torch


def one(name, change):
    """Weights with one tensor changed."""
    return lambda tensors: tensors | {name: change(tensors[name])}


def number(value, place=0):
    def change(x):
        x = x.clone()
        x.view(-1)[place] = value
        return x

    return change


def all_of(dtype):
    return lambda tensors: {name: x.to(dtype) for name, x in tensors.items()}


def more(**tensors):
    return lambda there: there | {name: torch.zeros(2) for name in tensors} | tensors


def header(values, data=b""):
    """Bytes of a safetensors file with this header."""
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return lambda tensors: struct.pack("<Q", len(text)) + text + data


def raw(data):
    return lambda tensors: data


def claims(shape, dtype="F32", end=None, name="key"):
    """A header that claims a tensor of this shape."""
    end = 16 if end is None else end
    return header({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}, bytes(16))
