"""How a run is described: Hydra's YAML chooses, dataclasses check, code receives ordinary values.

Owns the legal keys and their types (`schema`), turning a command line into a checked `Config` (`load`, `convert`, `check`),
the run's one folder and its one error message (`run`), making models and layers from a config (`build`), and all that a run
needs on one mesh (`parts`), also from a checkpoint (`saved`). Nothing below imports this room, and Hydra is imported only when
a command line is read.
"""

from tpattn.config.build import build
from tpattn.config.load import load, load_dumped
from tpattn.config.parts import Parts, deciding, parts
from tpattn.config.run import make_run_dir, one_message
from tpattn.config.saved import saved_model
from tpattn.config.schema import (
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    dump,
)

__all__ = [
    "AttentionConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "Parts",
    "RunConfig",
    "TrainConfig",
    "build",
    "deciding",
    "dump",
    "load",
    "load_dumped",
    "make_run_dir",
    "one_message",
    "parts",
    "saved_model",
]
