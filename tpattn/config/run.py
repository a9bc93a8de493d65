"""The one folder of a run, whatever the number and the delays of its ranks, and the one message of a run that cannot start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from tpattn.config.schema import Config, ConfigError
from tpattn.errors import TpattnError

_MARK = ".launch"  # in a run's folder: which launch made it
_WAIT_SECONDS = 5.0


def make_run_dir(
    cfg: Config, rank: int, broadcast_from_rank0: Callable[[str], str], *, start_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """The run's folder, made by rank 0 and the same on every rank; also written to cfg.run.dir, entered if cfg.run.chdir.

    Without run.dir it is runs/ID below the folder the user started in: ID is torchrun's run id where that is a real one, else
    rank 0's clock. A folder that exists belongs to another run, so ID-2, ID-3, ... are tried; but a launch that torchrun
    restarts finds the folder that it made before. A run.dir with files of another run is taken only to continue it.

    broadcast_from_rank0   returns, on every rank, the text that rank 0 gave; one call
    env                    None = os.environ
    raises                 ConfigError on every rank when rank 0 cannot make the folder
    """
    env = os.environ if env is None else env
    start = Path.cwd() if start_dir is None else Path(start_dir)
    told = ""
    if rank == 0:
        try:
            told = json.dumps({"dir": str(_choose(cfg, start, env))})
        except ConfigError as error:
            told = json.dumps({"error": str(error)})
        except OSError as error:
            place = cfg.run.dir or start / "runs"
            told = json.dumps({"error": f"run.dir={place}: cannot make the run's folder: {error.strerror}: {error.filename}"})
    answer = json.loads(broadcast_from_rank0(told))
    if "error" in answer:
        raise ConfigError(answer["error"])
    folder = Path(answer["dir"])
    folder.mkdir(parents=True, exist_ok=True)  # another machine may not see rank 0's disk
    cfg.run.dir = str(folder)
    if cfg.run.chdir:
        os.chdir(folder)
    return folder


def _choose(cfg: Config, start: Path, env: Mapping[str, str]) -> Path:
    """Rank 0's part of `make_run_dir`: the folder, which exists afterwards."""
    restarted = int(env.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if cfg.run.dir is not None:
        folder = start / cfg.run.dir
        resume = cfg.train.resume
        continues = restarted or resume == "auto" or (isinstance(resume, str) and folder in Path(resume).parents)
        if not continues and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"run.dir={folder}: the folder has files of another run; "
                "train.resume=auto would continue it, another run.dir would start a new one"
            )
        folder.mkdir(parents=True, exist_ok=True)
        _take(folder)
        return folder
    runs = start / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    run_id = re.sub(r"[^A-Za-z0-9._-]+", "-", env.get("TORCHELASTIC_RUN_ID", "")).strip(".-")[:100]
    real = bool(run_id) and run_id != "none"
    launch = _launch(env)
    if launch and (restarted or real):
        mine = [mark.parent for mark in runs.glob(f"*/{_MARK}") if mark.read_text() == launch]
        if mine:
            newest = max(mine, key=lambda folder: (folder / _MARK).stat().st_mtime_ns)
            _take(newest)
            return newest
    made = _numbered(runs, run_id) if real else []
    if restarted and made:  # by another agent: rank 0 has moved to another machine
        return made[-1]
    name = run_id if real else datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 10_000):
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()  # fails when it exists, so of two runs one moves on
        except FileExistsError:
            continue
        (folder / _MARK).write_text(launch)
        _take(folder)
        return folder
    raise ConfigError(f"run.dir: {runs / name} and the names after it are taken; give run.dir=FOLDER")


_taken: dict[Path, int] = {}  # folders that this process works in -> the open folder that holds the lock


def _take(folder: Path) -> None:
    """Hold the folder until this process ends, so that two runs never write into one; where the system has file locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    folder = folder.resolve()
    if folder in _taken:
        return
    handle = os.open(folder, os.O_RDONLY)  # open as long as the process lives
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"run.dir={folder}: another run is working in this folder; wait for it, or give another run.dir"
        ) from None
    except OSError:  # a file system without locks
        pass
    _taken[folder] = handle


def _numbered(runs: Path, name: str) -> list[Path]:
    """name, name-2, name-3, ... as far as they exist."""
    found = [runs / name] if (runs / name).is_dir() else []
    while found and (runs / f"{name}-{len(found) + 1}").is_dir():
        found.append(runs / f"{name}-{len(found) + 1}")
    return found


def _launch(env: Mapping[str, str]) -> str:
    """What the processes of one launch of torchrun share, restarted ones too, and no other launch: "" without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in env:
        return ""
    agent = os.getppid()
    try:
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]  # in clock ticks since boot
    except (OSError, IndexError):
        started = "unknown"
    return f"{env['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent} {started}"


@contextlib.contextmanager
def one_message(env: Mapping[str, str] | None = None) -> Iterator[None]:
    """Around the start of a script: a user's mistake becomes one line from rank 0 and exit status 1 on every rank.

    A mistake is a TpattnError that is also a ValueError or TypeError: all ranks see the same. Other errors pass through.
    """
    env = os.environ if env is None else env
    try:
        yield
    except TpattnError as error:
        if not isinstance(error, ValueError | TypeError):
            raise
        if env.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
        elif "TORCHELASTIC_RUN_ID" in env:
            time.sleep(_WAIT_SECONDS)  # torchrun ends all ranks with the first: let rank 0, which may be later, be the one
        raise SystemExit(1) from None
