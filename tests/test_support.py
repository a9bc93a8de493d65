"""What attention can do on which leg with which transport, on every layout: each cell equals serial or is refused by name.

README's table "on the CPU" is generated from `SUPPORT`, and the tests read it there. `python tests/test_support.py` rewrites it.
"""

from typing import Any, NamedTuple

import pytest
import tables
import torch
from helpers import close, far, seeded
from oracle import changed_attention_and_gradients as whole
from pool import ranks

from tpattn import AttentionGrid, ParallelContext, RandomKey, SequenceLayout, Unsupported, masks, sequence_attention

NAME = "support"
LEGS = {"ulysses": ("ulysses", "exchange"), "ring": ("ring", "exchange"), "ring, rotate": ("ring", "rotate"),
        "merge": ("merge", "exchange")}
KINDS = ["contiguous", "zigzag", "striped", "balanced", "of"]
B, H, K, D = 2, 4, 2, 4


class Row(NamedTuple):
    """One row of the table: a mask or an option, and the legs on which it is refused.

    mask        function of T; a dense table is made by `table`
    options     of sequence_attention, beside the changes of scores
    changes     softcap, slopes, sinks, dropout
    T, block    tokens, and the block of the layouts
    """

    mask: Any = lambda T: masks.full()
    options: dict = {}
    changes: tuple = (None, None, None, None)
    refused: tuple = ()
    T: int = 13
    block: int = 1
    kinds: tuple = tuple(KINDS)


def table(T):
    """Another table for each sequence and head; row 1 reads nothing."""
    allowed = torch.rand(B, H, T, T, generator=torch.Generator().manual_seed(0)) < 0.6
    allowed[:, :, 1] = False
    return allowed


def valid(T):
    return torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.7


SUPPORT = {
    "no mask": Row(),
    "`causal`": Row(lambda T: masks.causal()),
    "`causal & window`": Row(lambda T: masks.causal() & masks.window(2)),
    "`window` to both sides": Row(lambda T: masks.window(2, 4)),
    "`documents`": Row(lambda T: masks.causal() & masks.documents([[5, T - 5], [T]])),
    "`causal \\| prefix`": Row(lambda T: masks.causal() | masks.prefix(4)),
    "`padding`": Row(lambda T: masks.padding(valid(T))),
    "`dense`, one for each head too": Row(lambda T: masks.dense(table(T))),
    "`dense` with others by `&` and `\\|`": Row(lambda T: masks.dense(table(T)) & masks.causal() | masks.window(1)),
    '`kernel="math"`, `remat`': Row(lambda T: masks.causal(), {"kernel": "math", "remat": True}),
    "softcap, ALiBi, sinks, dropout": Row(lambda T: masks.causal(), {}, (1.3, True, True, (0.3, RandomKey(3, 1)))),
    "`deterministic`, layouts with `block=256`": Row(
        lambda T: masks.causal(), {"deterministic": True}, refused=("ring, rotate", "merge"), T=600, block=256,
        kinds=("contiguous", "zigzag", "striped", "balanced")),
}


def layout_of(kind, T, n, mask, block):
    if kind == "balanced":
        return SequenceLayout.balanced(mask, T, n, block=block)
    if kind == "of":
        order = torch.randperm(T, generator=torch.Generator().manual_seed(2))
        return SequenceLayout.of(order.tensor_split(n))
    return getattr(SequenceLayout, kind)(T, n, block=block)


def share(mask, p):
    """The mask as the rank with positions p passes it: its rows of a dense table."""
    if isinstance(mask, masks._Dense):
        return masks.dense(mask.allowed[..., p, :])
    return type(mask)(share(mask.a, p), share(mask.b, p)) if isinstance(mask, masks._Pair) else mask


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", SUPPORT)
def test_each_cell_equals_serial_or_is_refused(rank, world, name):
    """C25: every mask and option x layout x leg x transport x N = 1 to 4 does what README's table says of it."""
    cells = dict(zip(LEGS, dict((row[0], row[1:]) for row in tables.rows_in_readme(NAME))[name], strict=True))
    row, dtype = SUPPORT[name], torch.float64
    T, mask = row.T, row.mask(row.T)
    q, k, v, g = (seeded(B, T, heads, D, seed=i, dtype=dtype) for i, heads in enumerate((H, K, K, H)))
    softcap, slopes, sinks, dropout = row.changes
    slopes, sinks = (seeded(H, seed=7 + i).abs() if given else None for i, given in enumerate((slopes, sinks)))
    allowed = masks.allowed(mask, torch.arange(T), T)
    want = whole(q, k, v, g, allowed, None, softcap, slopes, sinks, dropout)
    if name != "no mask":
        far(want[0], whole(q, k, v, g, torch.ones_like(allowed))[0])
    with ParallelContext.from_env(cp=world, timeout=60) as ctx:
        for leg, (size, transport) in LEGS.items():
            for kind in row.kinds:
                layout = layout_of(kind, T, world, mask, row.block)
                p = layout.positions(rank)
                inputs = [x[:, p].clone().requires_grad_() for x in (q, k, v)]
                mine = None if sinks is None else sinks.clone().requires_grad_()

                def call(inputs=inputs, mine=mine, layout=layout, p=p, size=size, transport=transport):
                    return sequence_attention(
                        *inputs, ctx=ctx, mask=share(mask, p), layout=layout, grid=AttentionGrid(**{size: world}),
                        transport=transport, softcap=softcap, alibi_slopes=slopes, sinks=mine, dropout=dropout, **row.options)

                if cells[leg] == "refused" and world > 1:       # on one rank there is no leg
                    with pytest.raises(Unsupported, match=name.split("`")[1]):
                        call()
                    continue
                assert world == 1 or cells[leg] == "equal"
                out = call()
                out.backward(g[:, p])
                try:
                    close([out, *(x.grad for x in inputs)], [want[0][:, p], *(x[:, p] for x in want[2:5])])
                except AssertionError as error:
                    raise AssertionError(f"{leg}, {kind}: {error}") from None
                if mine is not None:
                    torch.distributed.all_reduce(mine.grad)
                    close(mine.grad, want[5])


def test_the_readme_holds_the_table():
    """Generated from the rows above; `python tests/test_support.py` rewrites it."""
    assert tables.in_readme(NAME) == generated()


def generated():
    """The table in Markdown."""
    rows = [[name, *("refused" if leg in row.refused else "equal" for leg in LEGS)] for name, row in SUPPORT.items()]
    return tables.table(["on the CPU, every layout", "`ulysses`", "`ring`", '`ring`, `transport="rotate"`', "`merge`"], rows)


if __name__ == "__main__":
    tables.write(NAME, generated())
