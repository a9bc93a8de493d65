"""A checkpoint on disk: its files, what makes it complete and sound, which is the newest, which may go. Knows no processes.

A checkpoint is a folder step_000040 with

    rank_0000_000.bin, ...  the tensors' bytes, block after block, as their ranks wrote them
    metadata.json           which block of which tensor lies where; the step, the mesh, versions, and what the run kept beside
    manifest.json           size and SHA-256 of each other file; written last

All is JSON and numbers, nothing in it is ever run. It is written as step_000040.draft, put on disk, and renamed, so a folder with
the plain name is complete, whenever its writer was killed. Other endings: .replaced is what a new folder of the same step stands
in for, counted until that is in place; .left belongs to steps that were made anew, and stays; .removed is on its way out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpattn.errors import TpattnError

FOLDER = "checkpoints"  # in a run's folder
METADATA, MANIFEST = "metadata.json", "manifest.json"
FORMAT = 2  # 1 was torch's own files, with a pickle
REMEDY = "remove it, or name an older one"
_STEP = re.compile(r"step_(\d{1,18})")
_FILE = re.compile(r"[A-Za-z0-9_]+\.(bin|json)")  # no folders, no dots that climb


class CheckpointError(TpattnError, ValueError):
    """A checkpoint that cannot be written, is broken, or belongs to another model; the same on every rank."""


@dataclass(frozen=True)
class File:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    bytes: int
    sha256: str


# ---- names -----------------------------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    """The folder of the checkpoint after `step` steps."""
    return f"step_{step:06}"


def step_of(path: Path, ending: str = "") -> int | None:
    """The step that a checkpoint's folder is named after, with or without this ending; None for other names."""
    found = _STEP.fullmatch(path.name.removesuffix(ending))
    return int(found[1]) if found else None


def complete(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints in `folder`, newest first. One that was stepping aside when its writer was killed counts."""
    found: dict[int, Path] = {}
    for path in sorted(Path(folder).absolute().glob("step_*"), reverse=True):  # .replaced before the plain name, which wins
        step = step_of(path, ".replaced")
        if step is not None and (path / MANIFEST).exists():
            found[step] = path
    return [path for _, path in sorted(found.items(), reverse=True)]


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step in `folder`; None when there is none."""
    found = complete(folder)
    return found[0] if found else None


def unfinished(folder: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """(step, folder) of what in `folder` is named as a checkpoint, or a draft of one, and has no manifest; newest first."""
    found = []
    for path in Path(folder).absolute().glob("step_*"):
        step = step_of(path, ".draft")
        if step is not None and not (path / MANIFEST).exists():
            found.append((step, path))
    return sorted(found, reverse=True)


def choose(path: Path) -> Path:
    """The checkpoint that `path` means: itself, the newest of a folder of them, or of a run's folder."""
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return path
    broken = [p for p in (path, path / FOLDER) for _, p in unfinished(p) if p.suffix != ".draft"]
    return newest(path) or newest(path / FOLDER) or (broken or [path])[0]


# ---- writing ---------------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> File:
    """Write `value` and put it on disk."""
    raw = _text_of(value).encode()
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return File(len(raw), digest(raw))


def begin(draft: Path) -> int | None:
    """A new empty folder for a draft; what a killed run left under the name goes, and so does what was on its way out.

    returns     a file number whose lock keeps others from the draft until it is closed; None where the system has no such locks
    raises      OSError, also when another save is writing there
    """
    if draft.exists() and not draft.is_symlink() and draft.is_dir():
        lock = _lock(draft)
        shutil.rmtree(draft)
        if lock is not None:
            os.close(lock)
    elif os.path.lexists(draft):
        draft.unlink()
    draft.mkdir(parents=True)
    for path in draft.parent.glob("step_*.removed"):
        _delete(path)
    return _lock(draft)


def _lock(folder: Path) -> int | None:
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise OSError("another save is writing there; use one Saver for a folder, and another folder for another run") from None
    except OSError:  # a file system without locks
        os.close(number)
        return None
    return number


def _delete(path: Path) -> None:
    """Remove a folder, a file or a link, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def publish(draft: Path, final: Path, files: Mapping[str, File]) -> None:
    """Complete a written draft with its manifest and give it its name. What had that name is there until the new one is."""
    write_json(draft / MANIFEST, {"format": FORMAT, "files": {name: asdict(file) for name, file in sorted(files.items())}})
    sync(draft)
    aside = final.with_name(final.name + ".replaced")
    if (final / MANIFEST).exists():
        if os.path.lexists(aside):
            _remove(aside)
        final.rename(aside)
    elif os.path.lexists(final):  # no checkpoint, and one that stands aside may be needed still
        _remove(final)
    draft.rename(final)
    sync(final.parent)
    if os.path.lexists(aside):
        _remove(aside)


def prune(folder: Path, keep: int, spare: Path) -> None:
    """Remove all complete checkpoints but the newest `keep` (0 = all stay) and `spare`."""
    for path in complete(folder)[keep:] if keep else []:
        if path != spare:
            with contextlib.suppress(OSError):  # the new one is there; the next save tries again
                _remove(path)


def set_aside(folder: str | os.PathLike[str], after: int) -> list[Path]:
    """Rename the complete checkpoints of steps after `after`, which a run that goes on from there will make anew: to .left.

    Else the newest would be one of a history that the run has left. They stay on disk, and are not taken for the run's own.
    """
    moved = []
    for path in complete(folder):
        if (step_of(path, ".replaced") or 0) > after:
            free = (path.with_suffix(f".left{i or ''}") for i in range(10_000))
            moved.append(path.rename(next(p for p in free if not p.exists())))
    return moved


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a half removed one is never taken for one."""
    out = path.with_name(path.name + ".removed")
    _delete(out)
    path.rename(out)
    _delete(out)


def sync(folder: Path) -> None:
    """Put a folder's names on disk, where the system lets a folder be opened."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def json_values(value: Any) -> Any:
    """`value` as it will come back.

    raises      CheckpointError for what JSON does not know
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"about={str(value)[:200]}: {error}; only JSON values can be kept") from None


def digest(raw: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(raw).hexdigest()


def _text_of(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


# ---- reading ---------------------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> dict[str, File]:
    """The files of the checkpoint `path`, all there and of the right size.

    raises      CheckpointError
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; needed: a checkpoint (step_NNNNNN), or a run's folder that has one")
    if not (path / MANIFEST).exists():
        old = (path / "state.json").exists()
        raise CheckpointError(
            f"{path}: {'saved by an earlier tpattn in a format with pickles, which is not read' if old else 'no checkpoint'}: "
            f"it has no {MANIFEST}"
        )
    value = read_json(path, MANIFEST)
    if isinstance(value, dict) and "format" in value and value["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: {MANIFEST} is of format {value['format']!r}; this version of tpattn reads format {FORMAT}"
        )
    try:
        files = {name: File(**entry) for name, entry in value["files"].items()}
        sound = all(isinstance(f.bytes, int) and isinstance(f.sha256, str) for f in files.values()) and METADATA in files
        sound = sound and all(_FILE.fullmatch(name) for name in files) and len(value) == 2
    except (TypeError, KeyError, AttributeError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path}: the checkpoint is broken: {MANIFEST} does not list files; {REMEDY}")
    for name, file in files.items():
        try:
            found = (path / name).lstat()
        except OSError as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
            raise CheckpointError(f"{path}: the checkpoint is broken: {name} {what}; {REMEDY}") from error
        if not stat.S_ISREG(found.st_mode):  # a link may lead out of the folder, a pipe blocks
            raise CheckpointError(f"{path}: the checkpoint is broken: {name} is not an ordinary file; {REMEDY}")
        if found.st_size != file.bytes:
            raise CheckpointError(f"{path}: the checkpoint is broken: {name} has {found.st_size} bytes of {file.bytes}; {REMEDY}")
    return files


def read_json(path: Path, name: str) -> Any:
    """The value in a checkpoint's JSON file.

    raises      CheckpointError, also when the text is not exactly as `write_json` writes it: then something changed it
    """
    try:
        raw = _open(path / name)
        value = json.loads(raw)
        if _text_of(value).encode() != raw:
            raise ValueError("its text was changed")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        told = error.strerror or error if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: the checkpoint is broken: {name} cannot be read: {told}; {REMEDY}") from error
    return value


def _open(path: Path) -> bytes:
    """An ordinary file's bytes, no link's."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError("not an ordinary file")
        return file.read()


def changed_files(path: Path, files: Mapping[str, File], names: Sequence[str], threads: int = 1) -> list[str]:
    """Those of `names` whose bytes are not those that were written, by their SHA-256; one that cannot be read counts."""

    def changed(name: str) -> bool:
        try:
            with (path / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() != files[name].sha256
        except OSError:
            return True

    with ThreadPoolExecutor(max(1, threads)) as pool:
        return [name for name, wrong in zip(names, pool.map(changed, names), strict=True) if wrong]


def share_of(files: Mapping[str, File], rank: int, size: int) -> list[str]:
    """The names that rank `rank` of `size` verifies, so that each has about as many bytes; every file has one rank."""
    loads, mine = [0] * size, []
    for name, file in sorted(files.items(), key=lambda item: (-item[1].bytes, item[0])):
        taker = loads.index(min(loads))
        loads[taker] += file.bytes
        if taker == rank:
            mine.append(name)
    return mine
