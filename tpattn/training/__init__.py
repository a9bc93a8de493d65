"""The loop of a run: which learning rate, one step, many steps, and what a run tells and records of itself.

Owns the order in a step (loss, backward, finish, clip, check, update), the schedule, metrics.jsonl and .csv, TensorBoard's files,
the step line, the picture of a run, and how ranks agree before they start. Leaves the text to `data`, files of weights to whoever
is handed in as `save`.
Steps count from 1; `done` is the number of steps already made.
"""

from tpattn.training.agree import check_same, first_fault, from_rank0, together
from tpattn.training.loop import NonFiniteLoss, Schedule, adamw, evaluate, train, train_step
from tpattn.training.picture import PICTURE, draw_loss
from tpattn.training.record import BOARD, METRICS, TABLE, Record, need_tensorboard, read_metrics
from tpattn.training.stop import StopSignal

__all__ = [
    "BOARD",
    "METRICS",
    "PICTURE",
    "TABLE",
    "NonFiniteLoss",
    "Record",
    "Schedule",
    "StopSignal",
    "adamw",
    "check_same",
    "draw_loss",
    "evaluate",
    "first_fault",
    "from_rank0",
    "need_tensorboard",
    "read_metrics",
    "together",
    "train",
    "train_step",
]
