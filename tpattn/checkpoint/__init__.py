"""Checkpoints of a run: model, optimizer, step, and what they belong to, on any mesh, through torch.distributed.checkpoint.

`files` knows what a checkpoint on disk is, `index` what its metadata says, `storage` moves bytes for torch's planner, `tensors`
knows what a run's tensors are and where a rank's blocks lie; `saving` and `loading` are what a run calls, `weights` writes the
model alone for other programs. Loading runs no code from a checkpoint and reads nothing outside its folder.
"""

from tpattn.checkpoint.files import FOLDER, CheckpointError, complete, newest, set_aside
from tpattn.checkpoint.loading import CheckpointWarning, load, load_latest, read_about
from tpattn.checkpoint.saving import Saver, save
from tpattn.checkpoint.weights import export_weights, import_weights

__all__ = [
    "FOLDER",
    "CheckpointError",
    "CheckpointWarning",
    "Saver",
    "complete",
    "export_weights",
    "import_weights",
    "load",
    "load_latest",
    "newest",
    "read_about",
    "save",
    "set_aside",
]
