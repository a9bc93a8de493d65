"""Text from a model: one token after another, the same on every rank and on every mesh.

Owns which token comes next (greedy, temperature, top-p) and how a growing list of ids becomes text that can be printed. Leaves
the tokenizer to the caller. There is no cache of keys and values yet: each token is a forward of the whole text so far.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpattn import comm
from tpattn.errors import CollectiveMismatch, Unsupported
from tpattn.layout import SequenceLayout, chunk_sizes
from tpattn.mesh import ParallelContext
from tpattn.random import fold, uniform

_NONE, _BROKEN = -1, -2  # in the place of an id: another rank has it; the logits are no numbers


def generate(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    *,
    ctx: ParallelContext,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    end: int | None = None,
    window: int | None = None,
    limit: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> Iterator[int]:
    """The ids of the tokens that follow `tokens`, one at a time; every rank of the mesh calls it alike and takes each of them.

    model       called as model(tokens, layout=), gives logits [1, t, v] (or whole ones, [1, t, V]); has `vocab_size`. Weights may
                be divided by FSDP2. It computes without dropout and without gradients, and is left in the mode it was in
    tokens      [n] ids, n > 0, the same on every rank: the text so far, whole
    temperature divides the logits; 0 = the likeliest token, of equal ones the lowest id
    top_p       draw from the smallest set of tokens whose probabilities sum to top_p or more, of equal ones the lowest ids first
    seed        a draw depends on (seed, its place in the text) alone: a text that is handed in again goes on as it would have
    end         stop at this id, which is not given out; None = never
    window      most tokens the model was trained on: it sees the last `window` of the text; None = all
    limit       give out ids below it alone: the tokenizer's, where the model's vocabulary is larger; None = all
    stop        asked on every rank before each token; True on any rank ends it on all
    cost        a forward of the text for each token, padded so that ranks have equal shares; sent besides: the last position's
                logits over tp, and an integer over the mesh, so that ranks cannot differ in what they give out
    raises      Unsupported at the call, before anything is sent; at the first token CollectiveMismatch on every rank when ranks
                were given other arguments; Unsupported on every rank when the logits are no numbers
    """
    if isinstance(tokens, Tensor) and tokens.dim() != 1:
        raise Unsupported(f"generate: the prompt has the shape {list(tokens.shape)}; needed: [n], the ids of one text")
    ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    vocab_size = getattr(model, "vocab_size", None)
    if not isinstance(vocab_size, int):
        raise Unsupported(f"generate: {type(model).__name__} has no vocab_size; needed: a decoder such as tpattn.Transformer")
    if getattr(model, "ctx", ctx) is not ctx:
        raise Unsupported("generate: the model belongs to another ParallelContext; pass ctx=model.ctx")
    ctx.world.require_open()
    if not ids:
        raise Unsupported("generate: the prompt has no token; needed: at least one, such as the tokenizer's end")
    for name, there in (("a token of the prompt", ids), ("end", [] if end is None else [end])):
        for i in there:
            if not _whole(i) or not 0 <= i < vocab_size:
                raise Unsupported(f"generate: {name} is {i!r}; needed: an id from 0 to {vocab_size - 1}, the model's vocabulary")
    limit = vocab_size if limit is None else limit
    for name, value, least in (
        ("max_new_tokens", max_new_tokens, 0),
        ("window", 1 if window is None else window, 1),
        ("limit", limit, 1),
    ):
        if not _whole(value) or value < least:
            raise Unsupported(f"generate: {name}={value!r}; needed: a whole number, {least} or more")
    if not _whole(seed):
        raise Unsupported(f"generate: seed={seed!r}; needed: a whole number")
    check_sampling(temperature, top_p)
    asked = (ids, max_new_tokens, float(temperature), float(top_p), seed, end, window, limit)
    return _generate(model, ids, asked, ctx, max_new_tokens, float(temperature), float(top_p), seed, end, window, limit, stop)


def check_sampling(temperature: float, top_p: float) -> None:
    """Unsupported unless temperature is a finite number from 0 up and top_p lies in (0, 1]."""
    number = (int, float)
    if not isinstance(temperature, number) or isinstance(temperature, bool) or not 0.0 <= temperature < math.inf:
        raise Unsupported(f"generate: temperature={temperature!r}; needed: a number from 0 (the likeliest token) up, such as 0.8")
    if not isinstance(top_p, number) or isinstance(top_p, bool) or not 0.0 < top_p <= 1.0:
        raise Unsupported(f"generate: top_p={top_p!r}; needed: more than 0, up to 1 (every token may be drawn)")


def choose(logits: Tensor, temperature: float, top_p: float, chance: float) -> int:
    """The next token: of the likeliest ones that `top_p` keeps, in the order of ids, the one at `chance` of their probability.

    logits      [V]; computed in float64, so that ranks and meshes that differ in rounding rarely differ in the token
    chance      uniform in [0, 1); not used when temperature is 0

    Tokens are lined up by id, not by probability: two of nearly equal probability may change places by rounding.
    """
    wide = logits.detach().to("cpu", torch.float64)
    if temperature == 0.0:
        return int((wide == wide.max()).nonzero()[0])
    p = torch.softmax((wide - wide.max()) / temperature, dim=0)
    if top_p < 1.0:
        likely, order = torch.sort(p, descending=True, stable=True)
        count = min(int((likely.cumsum(0) < top_p).sum()) + 1, len(p))
        p = torch.zeros_like(p).index_copy(0, order[:count], likely[:count])
    sums = p.cumsum(0)
    place = int(torch.searchsorted(sums, chance * sums[-1], right=True))
    return min(place, int(p.nonzero()[-1]))  # rounding may reach the sum itself


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _generate(
    model: nn.Module,
    ids: list[int],
    asked: tuple[Any, ...],
    ctx: ParallelContext,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    end: int | None,
    window: int | None,
    limit: int,
    stop: Callable[[], bool] | None,
) -> Iterator[int]:
    _check_same(asked, ctx)
    key = fold(seed, "generate")
    for _ in range(max_new_tokens):
        chance = float(uniform(key, torch.tensor(len(ids))))
        logits = _last_logits(model, ids if window is None else ids[-window:], ctx)
        own = _NONE
        if logits is not None:
            logits = logits[:limit]
            own = choose(logits, temperature, top_p, chance) if bool(logits.isfinite().any()) and not _broken(logits) else _BROKEN
        rows = comm.agree([own, int(stop is not None and stop())], ctx.world)
        token = next(row[0] for row in rows if row[0] != _NONE)
        if token == _BROKEN:
            raise Unsupported("generate: the logits are no finite numbers: the weights are broken; load another checkpoint")
        if token == end or any(row[1] for row in rows):
            return
        ids.append(token)
        yield token


def _broken(logits: Tensor) -> bool:
    """-inf forbids a token; nan and inf are mistakes."""
    return bool((logits.isnan() | (logits == math.inf)).any())


def _last_logits(model: nn.Module, ids: Sequence[int], ctx: ParallelContext) -> Tensor | None:
    """The logits [V] of the last token on the cp ranks that hold it, on others None.

    Padding stands behind the text, where a causal model does not see it; it gives each rank as many tokens, over tp too.
    """
    ranks = ctx.cp.size * ctx.tp.size
    padded = torch.zeros(-(-len(ids) // ranks) * ranks, dtype=torch.int64)
    padded[: len(ids)] = torch.tensor(ids)
    layout = SequenceLayout.contiguous(len(padded), ctx.cp.size)
    positions = layout.positions(ctx.cp.rank)
    with evaluating(model):
        logits: Tensor = model(padded[positions].to(ctx.device)[None], layout=layout)
        last = (positions == len(ids) - 1).nonzero()
        if not len(last):
            return None
        row = logits[0, int(last)].detach()
        vocab_size = int(model.vocab_size)  # type: ignore[arg-type]
        if ctx.tp.size > 1 and len(row) != vocab_size:
            row = torch.cat(comm.all_gather(row, [[v] for v in chunk_sizes(vocab_size, ctx.tp.size)], ctx.tp))
        return row


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients inside; afterwards each module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _check_same(asked: tuple[Any, ...], ctx: ParallelContext) -> None:
    """CollectiveMismatch on every rank unless all were asked for the same: later they would wait for one another."""
    if ctx.world.size == 1:
        return
    digest = int.from_bytes(hashlib.blake2b(repr(asked).encode(), digest_size=7).digest(), "little")
    digests = [row[0] for row in comm.agree([digest], ctx.world)]
    for rank, other in zip(ctx.world.ranks, digests, strict=True):
        if other != digests[0]:
            raise CollectiveMismatch(
                f"generate: rank {rank} was given another prompt or other options than rank {ctx.world.ranks[0]}; pass the same "
                "on all ranks: the prompt read on one rank reaches the others by tpattn.training.from_rank0"
            )
