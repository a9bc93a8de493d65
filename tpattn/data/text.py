"""Text on disk: files and folders of UTF-8 text, read as documents in the order of their names; what is no text is named.

Bytes stay as they are: line ends, a byte-order mark and Unicode forms are part of the text.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpattn.errors import TpattnError

_NAMES_SHOWN = 5
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DataError(TpattnError, ValueError):
    """A text file, folder or token stream that cannot be trained on; the message names it and says why."""


@dataclass(frozen=True)
class Document:
    """One text, whole: `name` relative to the corpus' folder with forward slashes, `text` as UTF-8 bytes."""

    name: str
    text: bytes


@dataclass(frozen=True)
class Corpus:
    """The documents of one source in the order of their names.

    source      where they come from, for a person
    skipped     (name, reason) of each file in the folder that is no text
    held_out    how many of the documents are kept for validation
    sha256      hash of every name, length and byte: equal on two machines exactly when the text is
    """

    source: str
    documents: tuple[Document, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    held_out: int = 0
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256()
        for document in self.documents:
            name = os.fsencode(document.name)
            digest.update(f"{len(name)} {len(document.text)} ".encode())
            digest.update(name)
            digest.update(document.text)
        object.__setattr__(self, "sha256", digest.hexdigest())

    @property
    def num_bytes(self) -> int:
        return sum(len(document.text) for document in self.documents)

    def describe(self) -> str:
        """One line for the log: source, size, hash, documents held out, and every kind of file that was left out."""
        line = f"{self.source}: {len(self.documents):,} documents, {self.num_bytes:,} bytes, sha256 {self.sha256[:16]}"
        line += f"; {self.held_out:,} held out for validation" if self.held_out else ""
        return f"{line}; skipped {list_skipped(self.skipped)}" if self.skipped else line


class TextFiles:
    """The documents at a path, read one at a time each time this is iterated over; nothing is kept in memory.

    path        a file (one document), or a folder, searched recursively: any suffix, every file that is UTF-8 text is one
                document. Hidden files and folders are not looked at. Files that are empty, binary or not UTF-8 are left out and
                named in `skipped`; a file or folder that cannot be read is an error, and so is a folder without any text.
                None: about 12 MB of .py files, without installed packages and tests
    source      where the documents come from, for a person
    skipped     after an iteration: (name, reason) of each file that is no text
    raises      DataError, naming the file; for what cannot be read, while iterating
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.skipped: list[tuple[str, str]] = []
        self._stdlib = path is None
        self._root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
        self.source = (
            shown(self._root) if path is not None else f"source of Python {platform.python_version()}'s standard library"
        )
        if path is not None and not self._root.exists():
            raise DataError(f"data.path={self.source}: no such file or folder (looked for {shown(self._root.absolute())})")

    def __iter__(self) -> Iterator[Document]:
        self.skipped, found = [], False
        if not self._stdlib and not self._root.is_dir():
            text, fault = _read_text(self._root)
            if fault:
                raise DataError(f"data.path={self.source}: the file is {fault}; needed: UTF-8 text")
            yield Document(self._root.name, text)
            return
        for name in self._files():
            text, fault = _read_text(self._root / name)
            if fault:
                self.skipped.append((name, fault))
            else:
                found = True
                yield Document(name, text)
        if not found and self._stdlib:
            raise DataError(
                "this Python has no readable standard-library source (.py files); give a text with data.path=FILE_OR_FOLDER"
            )
        if not found:
            files = list_skipped(self.skipped) if self.skipped else "no files that are not hidden"
            raise DataError(f"data.path={self.source}: the folder holds no UTF-8 text: {files}")

    def _files(self) -> list[str]:
        """The names to read, sorted."""
        if not self._stdlib:
            return sorted(_files_below(self._root))
        names = _files_below(self._root, _STDLIB_LEFT_OUT)
        return sorted(name for name in names if name.endswith(".py") and (self._root / name).stat().st_size)


def read_documents(path: str | os.PathLike[str] | None = None) -> Corpus:
    """The documents at `path`, sorted by name, in memory; without a path, the source of Python's own standard library.

    path        as in `TextFiles`
    raises      DataError, naming the file
    """
    files = TextFiles(path)
    documents = tuple(files)
    return Corpus(files.source, documents, tuple(files.skipped))


def _files_below(root: Path, left_out: Iterable[str] = ()) -> Iterator[str]:
    """Names, relative to `root`, of all files below it that are not hidden; of a linked folder its own name only."""

    def unreadable(error: OSError) -> None:
        raise DataError(f"{shown(error.filename)}: cannot read the folder: {error.strerror}") from error

    for folder, subfolders, files in os.walk(root, onerror=unreadable):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in left_out]
        linked = [name for name in subfolders if (Path(folder) / name).is_symlink()]  # not walked into: links can be circles
        for name in files + linked:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _read_text(path: Path) -> tuple[bytes, str]:
    """The bytes of `path` and "", or no bytes and the fault that makes it no text."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            return b"", "a linked folder" if path.is_dir() else "not a regular file"
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{shown(path)}: cannot read the file: {error.strerror}") from error
    if not text:
        return b"", "empty"
    if b"\0" in text:
        return b"", "binary (it holds a zero byte)"
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return b"", f"not UTF-8 (byte 0x{text[error.start]:02x} at offset {error.start})"
    return text, ""


def list_skipped(skipped: Sequence[tuple[str, str]]) -> str:
    """Each kind of file that was left out, with its number and some names."""
    kinds: dict[str, list[str]] = {}
    for name, reason in skipped:
        kinds.setdefault(reason.split(" (")[0], []).append(shown(name))
    lists = (f"{len(names)} {kind} ({', '.join(names[:_NAMES_SHOWN])}{', ...' if len(names) > _NAMES_SHOWN else ''})"
             for kind, names in kinds.items())  # fmt: skip
    return ", ".join(lists)


def shown(name: object) -> str:
    """A file name that any terminal can print."""
    return str(name).encode("utf-8", "replace").decode("utf-8")
