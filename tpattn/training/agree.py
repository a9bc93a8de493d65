"""How the ranks of a run agree before they start: one text for all, one outcome for all, one value on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tpattn import comm
from tpattn.errors import TpattnError, Unsupported
from tpattn.mesh import ParallelContext

T = TypeVar("T")


def from_rank0(text: str, ctx: ParallelContext) -> str:
    """The text that the first rank of the mesh gave, on every rank: two small all-gathers."""
    return _texts(text if ctx.world.rank == 0 else "", ctx)[0]


def check_same(what: str, value: str, ctx: ParallelContext) -> None:
    """Unsupported on every rank, with the values, unless all ranks hold the same `value` of `what`."""
    values = _texts(value, ctx)
    if len(set(values)) > 1:
        held = {one: [str(r) for r, v in zip(ctx.world.ranks, values, strict=True) if v == one] for one in dict.fromkeys(values)}
        told = "; ".join(f"{one} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for one, ranks in held.items())
        raise Unsupported(f"{what} is not the same on all ranks: {told}")


def together(attempt: Callable[[], T], ctx: ParallelContext) -> T:
    """What `attempt()` returns; or, on every rank, the mistake (TpattnError) that it raised on any of them.

    So a file that only one machine lacks ends the run with one message instead of a lost peer. Other errors pass at once.

    raises      the rank's own error when every rank raised the same text, else Unsupported that names the rank
    """
    value, mistake = None, None
    try:
        value = attempt()
    except TpattnError as error:
        mistake = error
    texts = _texts("" if mistake is None else str(mistake) or type(mistake).__name__, ctx)
    if mistake is not None and len(set(texts)) == 1:
        raise mistake
    for rank, text in zip(ctx.world.ranks, texts, strict=True):
        if text:
            raise Unsupported(f"rank {rank}: {text}") from mistake
    return value  # type: ignore[return-value]


def first_fault(text: str, ctx: ParallelContext) -> str:
    """The first rank's text that is not empty, on every rank: "" where all went well."""
    return next((one for one in _texts(text, ctx) if one), "")


def _texts(text: str, ctx: ParallelContext) -> list[str]:
    """Every rank's text, in rank order."""
    if ctx.world.size == 1:
        return [text]
    raw = text.encode("utf-8", "surrogateescape")
    lengths = [row[0] for row in comm.agree([len(raw)], ctx.world)]
    if not any(lengths):
        return [""] * ctx.world.size
    rows = comm.agree([*raw, *[0] * (max(lengths) - len(raw))], ctx.world)
    return [bytes(row[:n]).decode("utf-8", "surrogateescape") for row, n in zip(rows, lengths, strict=True)]
