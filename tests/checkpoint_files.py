"""Checkpoint files as a test reads and forges them: without tpattn, from the description of the format alone."""

import hashlib
import json

import torch


def _dump(value):
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def read_tensors(path):
    """Every tensor of a checkpoint, put together from its blocks; a place that no block covers would be nan or -1."""
    index = json.loads((path / "metadata.json").read_text())
    raw = {name: (path / name).read_bytes() for name in json.loads((path / "manifest.json").read_text())["files"]}
    tensors = {}
    for name, entry in index["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        whole = torch.full(entry["shape"], float("nan") if dtype.is_floating_point else 255, dtype=dtype)
        for block in entry["blocks"]:
            count = 1
            for n in block["lengths"]:
                count *= n
            piece = torch.frombuffer(bytearray(raw[block["file"]]), dtype=dtype, count=count, offset=block["place"])
            place = whole
            for dim, (start, length) in enumerate(zip(block["starts"], block["lengths"], strict=True)):
                place = place.narrow(dim, start, length)
            place.copy_(piece.view(block["lengths"]))
        tensors[name] = whole
    return tensors


def rewrite(path, change):
    """Change the index and the list of files as an attacker would: sizes and hashes fit again. None: the files as they are."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = manifest["files"]
    if change is not None:
        index = json.loads((path / "metadata.json").read_text())
        change(index, files)
        (path / "metadata.json").write_bytes(_dump(index))
    for name, entry in files.items():
        if (path / name).is_file() and "/" not in name:
            raw = (path / name).read_bytes()
            entry.update(bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    (path / "manifest.json").write_bytes(_dump(manifest))
