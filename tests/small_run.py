"""A small run for tests: a model with odd sizes, a text it can learn, and a stand-in for the record of its steps."""

import torch

from tpattn import AttentionGrid, Transformer
from tpattn.data import Batches, PackedTokens

V, B, T = 29, 5, 13


def small(ctx, grid=None, **options):
    """21 inner features and 29 words, uneven over tp 2, and heads uneven over cp 2 and 4; it learns in a few steps."""
    options = {"num_heads": 3, "head_dim": 6, "ffn": 21, "dtype": torch.float64, "seed": 5, **options}
    return Transformer(V, 24, 2, ctx=ctx, grid=AttentionGrid(*grid) if grid else "auto", **options)


def text(document_mask=False):
    """Documents of odd lengths in which a word mostly decides the next; every step trains on other sequences."""
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 40, (90,), generator=g)
    stream = torch.randint(0, V, (int(lengths.sum()),), generator=g)
    for i in range(1, len(stream)):
        if i % 5:
            stream[i] = (3 * stream[i - 1] + 1) % V
    return Batches(PackedTokens(stream, torch.cumsum(lengths, 0) - lengths, T), B, seed=11, document_mask=document_mask)


class Curve:
    """Stands for a `Record`: keeps loss and gradient norm of each step."""

    def __init__(self):
        self.rows = []

    def step(self, step, loss, grad_norm, *others, **more):
        self.rows.append([loss, grad_norm])
