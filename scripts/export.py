"""Writes a run's weights, undivided and with plain names, into one safetensors file.

    python scripts/export.py runs/ID model.safetensors

The file holds the run's config and tokenizer as text in its metadata, without what belongs to the run's machines: its mesh and
the place of its text. `tpattn.checkpoint.import_weights(model, file)` reads it back, on any mesh; other programs find torch's
usual shapes: [out, in] for every linear layer. Needs the extra hf.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the tpattn beside this script, installed or not

from tpattn import ParallelContext  # noqa: E402
from tpattn.checkpoint import export_weights  # noqa: E402
from tpattn.config import one_message, saved_model  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder (its newest checkpoint is taken), or a checkpoint")
    parser.add_argument("file", type=Path, help="the file to write")
    args = parser.parse_args()
    with one_message(), ParallelContext.single() as ctx:
        model, tokenizer, cfg = saved_model(args.run, ctx)
        cfg.data.path, cfg.data.tokenizer, cfg.run.dir, cfg.train.resume = None, "auto", None, "auto"
        about = {"config": dataclasses.asdict(cfg), "tokenizer": tokenizer.state()}
        path = export_weights(model, args.file, about=about)
        weights = sum(p.numel() for p in model.parameters())
    print(f"{path}: {weights:,} weights, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
