"""The order of the samples, and the share of a batch that a (dp, cp) pair of ranks holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tpattn import masks
from tpattn.data.packed import IGNORE, PackedTokens
from tpattn.data.text import DataError
from tpattn.layout import SequenceLayout
from tpattn.masks import Mask
from tpattn.random import bits, fold


@dataclass(frozen=True)
class Batch:
    """What one (dp, cp) pair of ranks holds of one step's batch; the same on all of their tp ranks.

    tokens, targets   [b, t] int64: column j is global position layout.positions(cp_rank)[j]; targets hold IGNORE
    documents         per row, the lengths of the documents in the *whole* sequence (their sum is T)
    first_sequence    place of the first row in this step's global batch of B sequences
    samples           per row, the sample of the packed text it is; -1 for a row that only fills a batch (see `ValidBatches`)
    layout            which positions each cp rank holds; None when one rank holds all of them
    mask              causal, and each document for itself; None = the model's own, in which a token sees all before it
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: list[list[int]]
    first_sequence: int
    samples: list[int]
    layout: SequenceLayout | None
    mask: Mask | None = None


Layout = SequenceLayout | Callable[[Mask], SequenceLayout]  # one for all batches, or made for the mask of each


class Batches:
    """The batches of a run, found by counting: sequence b of step s is number g = s B + b of the run.

    Number g is place g % samples of epoch g // samples, and each epoch visits every sample once, in an order that
    depends on (seed, epoch) alone: so the order is the same on every mesh, and resuming needs nothing but the step.
    There is no smaller last batch: the last samples of an epoch share one with the first of the next, on every rank alike.
    Steps count from 0: `step` is the number of steps already done.

    document_mask   hand out a mask under which tokens see only their own document
    """

    def __init__(self, packed: PackedTokens, batch_size: int, seed: int, document_mask: bool = False) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size}: a step needs at least 1 sequence")
        self.packed, self.batch_size, self.seed, self.document_mask = packed, batch_size, seed, document_mask
        self._orders: dict[int, torch.Tensor] = {}

    def order(self, epoch: int) -> torch.Tensor:
        """The samples of one epoch in the order they are visited: [samples] int64, a permutation."""
        if epoch not in self._orders:
            if len(self._orders) >= 2:  # a batch touches two neighbours, rarely more
                self._orders.clear()
            self._orders[epoch] = _permutation(self.packed.num_samples, self.seed, epoch)
        return self._orders[epoch]

    def samples(self, step: int) -> list[int]:
        """The samples in the global batch of `step`: B numbers."""
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0")
        numbers = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [int(self.order(g // self.packed.num_samples)[g % self.packed.num_samples]) for g in numbers]

    def share(self, step: int, layout: Layout | None = None, *, dp_rank: int = 0, dp_size: int = 1, cp_rank: int = 0) -> Batch:
        """The rows of dp rank `dp_rank` (B divided as `tensor_split` does) and, of each, the tokens of cp rank `cp_rank`.

        layout      may be a function of the mask of these rows, which all cp ranks of a dp rank then know alike
        """
        if self.batch_size < dp_size:
            raise DataError(
                f"batch_size={self.batch_size} gives nothing to some of the dp={dp_size} ranks: it counts the sequences of all "
                f"ranks together; batch_size={dp_size} or more would work, or dp={self.batch_size} at most"
            )
        each, more = divmod(self.batch_size, dp_size)
        first = dp_rank * each + min(dp_rank, more)
        mine = self.samples(step)[first : first + each + (dp_rank < more)]
        documents = [self.packed.documents(max(i, 0)) for i in mine]
        mask = masks.causal() & masks.documents(documents) if self.document_mask else None
        if layout is not None and not isinstance(layout, SequenceLayout):
            layout = layout(masks.causal() if mask is None else mask)
        if layout is not None and layout.T != self.packed.seq_len:
            raise DataError(f"the layout is for {layout.T} tokens, the samples have seq_len={self.packed.seq_len}")
        tokens = torch.stack([self.packed.tokens(max(i, 0)) for i in mine])
        targets = torch.stack([self.packed.targets(max(i, 0)) for i in mine])  # of the whole sequence, so shards cannot lose any
        targets[torch.tensor(mine) < 0] = IGNORE
        if layout is not None:
            positions = layout.positions(cp_rank)
            tokens, targets = tokens[:, positions], targets[:, positions]
        return Batch(tokens, targets, documents, first, mine, layout, mask)

    def batch(self, step: int, ctx: Any, layout: Layout | None = None) -> Batch:
        """`share` for this process of a ParallelContext (anything with dp.rank, dp.size, cp.rank, cp.size)."""
        if layout is None or isinstance(layout, SequenceLayout):
            holders = 1 if layout is None else layout.n
            if holders != ctx.cp.size:
                raise DataError(f"the layout divides the tokens over {holders} ranks, but cp={ctx.cp.size}")
        return self.share(step, layout, dp_rank=ctx.dp.rank, dp_size=ctx.dp.size, cp_rank=ctx.cp.rank)


class ValidBatches(Batches):
    """Samples in their own order, each once, for a loss on held-out documents: batch s of len(self) holds s B to (s + 1) B - 1.

    Every batch has B rows on every mesh. Those after the last sample repeat sample 0 with targets that are all IGNORE: they fill,
    and count nothing in a sum over counted tokens.
    """

    def __init__(self, packed: PackedTokens, batch_size: int, document_mask: bool = False) -> None:
        super().__init__(packed, batch_size, 0, document_mask)

    def __len__(self) -> int:
        return -(-self.packed.num_samples // self.batch_size)

    def samples(self, step: int) -> list[int]:
        """The samples in batch `step`: B numbers, -1 after the last sample."""
        if not 0 <= step < len(self):
            raise IndexError(f"batch {step} of {len(self)}")
        first = step * self.batch_size
        return [i if i < self.packed.num_samples else -1 for i in range(first, first + self.batch_size)]


def layout_for(word: str, seq_len: int, cp: int, document_mask: bool = False) -> Layout:
    """The layout that `attention.layout` names, for a decoder.

    auto is zigzag, which gives each rank equal causal work; with `document_mask` balanced, made anew for each batch's documents.
    """
    words = "auto", "contiguous", "zigzag", "striped", "balanced"
    if word not in words:
        raise DataError(f"attention.layout={word!r}: needed: {', '.join(words[:-1])} or {words[-1]}")
    if word == "auto":
        word = "balanced" if document_mask and cp > 1 else "zigzag"
    if word == "balanced":
        return lambda mask: SequenceLayout.balanced(mask, seq_len, cp)
    layout: SequenceLayout = getattr(SequenceLayout, word)(seq_len, cp)
    return layout


def _permutation(n: int, seed: int, epoch: int) -> torch.Tensor:
    """0 to n - 1 in an order drawn from (seed, epoch): [n] int64. `bits` is one-to-one for one key, so there are no ties."""
    return torch.argsort(bits(fold(seed, "epoch", epoch), torch.arange(n)))
