"""Everything that is refused, by the call that is refused. README's table "What is refused" is generated from this list.

`python tests/test_refusals.py` rewrites the table, after `REFUSED` was changed.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import tables
import torch
from pool import ranks

import tpattn
from tpattn import (
    AttentionGrid,
    ContextClosed,
    ParallelContext,
    RandomKey,
    SequenceLayout,
    TpattnError,
    Unsupported,
    ledger,
    masks,
)

NAME = "refused"
LAYOUT = SequenceLayout.zigzag(8, 2)                            # T = 8 on 2 ranks
Q, KV, WHOLE = torch.ones(2, 4, 4, 6), torch.ones(2, 4, 2, 6), torch.ones(2, 8, 2, 6)      # shares: t = 4, H = 4, K = 2, D = 6
KEY = RandomKey(0)


class Call(NamedTuple):
    """One refused call.

    act         called as act(ctx, rank)
    words       what its message must contain: the value, what was needed, what would work
    axis        of a context of 2 ranks: cp or tp
    error       its class, Unsupported unless what is refused is a step and not a value
    sends       the operations that may come before: all_gather where lengths, forms or seeds are agreed
    bare        the same call without a layout, refused with the same words; None = there is none
    """

    act: Callable
    words: tuple
    axis: str = "cp"
    error: type = Unsupported
    sends: tuple = ()
    bare: Callable | None = None


class Refusal(NamedTuple):
    """A row of the table, in Markdown, with the calls that it is about."""

    what: str
    instead: str
    calls: list


def attention(*words, **changes):
    """sequence_attention of shares that fit, but for the changes; without a layout too, where they have nothing to do with it."""
    def act(ctx, rank, **others):
        tpattn.sequence_attention(**{"q": Q, "k": KV, "v": KV, "ctx": ctx, "layout": LAYOUT, **changes, **others})

    about_lengths = {"layout", "kv_layout"} & changes.keys() or any(changes.get(name) is WHOLE for name in "qkv")
    return Call(act, words, bare=None if about_lengths else lambda ctx, rank: act(ctx, rank, layout=None))


def made(act, *words, axis="cp"):
    """Something that is refused when it is made."""
    return Call(lambda ctx, rank: act(ctx), words, axis)


def d_tensor(ctx, rank):
    from torch.distributed.tensor import DTensor, Shard

    x = DTensor.from_local(KV, ctx.mesh["cp"], [Shard(1)], run_check=False)
    tpattn.sequence_attention(Q, x, KV, ctx=ctx, layout=LAYOUT)


def other_forms(ctx, rank):
    table = torch.ones(4, 8, dtype=torch.bool) if rank == 0 else torch.ones(2, 4, 4, 8, dtype=torch.bool)
    tpattn.sequence_attention(Q, KV, KV, ctx=ctx, layout=LAYOUT, mask=masks.dense(table), grid=AttentionGrid(ulysses=2))


def deterministic(*words, layout, **options):
    def act(ctx, rank):
        x = torch.ones(1, layout.sizes[rank], 2, 4)
        tpattn.sequence_attention(x, x, x, ctx=ctx, layout=layout, deterministic=True, **options)

    return Call(act, words)


def kept_zeros(ctx, rank):
    """zero_grad(set_to_none=False) in a step whose gradients were finished."""
    layer = tpattn.RMSNorm(4, ctx=ctx)
    for _ in range(2):
        layer(torch.ones(2, 4)).sum().backward()
        tpattn.finish_gradients(layer)
        layer.zero_grad(set_to_none=False)


def closed(act):
    """act(context, layer) with a context that was closed since."""
    def call(ctx, rank):
        with ParallelContext.from_env(tp=2, timeout=60) as gone:
            norm = tpattn.RMSNorm(4, ctx=gone)
        act(gone, norm)

    return Call(call, ("context", "closed", "build a new ParallelContext"), error=ContextClosed)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


class Net(torch.nn.Module):
    """A module that FSDP2 could divide but for what `change` does to it; to build it sends nothing."""

    def __init__(self, ctx, change=lambda net: None):
        super().__init__()
        self.norm, self.more = tpattn.RMSNorm(4, ctx=ctx), torch.nn.Linear(4, 4)
        self.list = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        change(self)

    def forward(self, x):
        return self.more(self.norm(x))


def divided(*words, change=lambda net: None, units=lambda net: None, build=Net):
    """shard of such a module."""
    return made(lambda ctx: shard_of(build(ctx, change), ctx, units), *words)


def shard_of(net, ctx, units=lambda net: None):
    return tpattn.shard(net, ctx, units=units(net))


def parameter(make):
    return lambda net: setattr(net, "own", torch.nn.Parameter(make()))


def early_optimizer(ctx, rank):
    net = Net(ctx)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tpattn.shard(net, ctx)
    net(torch.ones(2, 4)).sum().backward()
    tpattn.finish_gradients(net)
    optimizer.step()


def all_inside_no_sync(ctx, rank):
    net = tpattn.shard(Net(ctx), ctx)
    with tpattn.no_sync(net):
        net(torch.ones(2, 4)).sum().backward()
    tpattn.finish_gradients(net)


def by_fully_shard(ctx):
    from torch.distributed.fsdp import fully_shard

    tpattn.finish_gradients(fully_shard(Net(ctx), mesh=ctx.mesh["cp"]))


BLOCK = SequenceLayout.contiguous(1100, 2, block=256)
REFUSED = [
    Refusal("dp x cp x tp that is not the number of processes", "the message lists sizes that work", [
        made(lambda ctx: ParallelContext.from_env(cp=3), "cp=3", "2 processes", "sizes that work: dp=1 cp=1 tp=2"),
        made(lambda ctx: ParallelContext.from_env(dp=-1, cp=-1), "cp=-1", "only one of", "sizes that work"),
        made(lambda ctx: ParallelContext.from_env(tp=0), "tp=0", "positive integer", "sizes that work"),
    ]),
    Refusal("ulysses x ring x merge that is not cp", "the message lists the divisors", [
        attention("ulysses=3", "cp=2", "one of 1, 2", grid=AttentionGrid(3)),
        attention("ring=-1", "cp=2", "multiply to 2", grid=AttentionGrid(ulysses=3, ring=-1)),
        made(lambda ctx: AttentionGrid(-1, -1), "only one of ulysses, ring, merge may be -1"),
        made(lambda ctx: tpattn.ParallelSelfAttention(8, 2, ctx=ctx, grid=AttentionGrid(3)), "ulysses=3", "cp=2", "one of 1, 2"),
    ]),
    Refusal("a size that leaves a tp rank without rows (5 on 4)", "another size or tp; uneven ones (9 on 2, 7 on 4) work", [
        made(lambda ctx: tpattn.ColumnParallelLinear(4, 1, ctx=ctx), "1 rows", "tp=2", "the size 2", axis="tp"),
        made(lambda ctx: tpattn.RowParallelLinear(1, 4, ctx=ctx), "1 rows", "tp=2", "the size 2", axis="tp"),
    ]),
    Refusal("heads that leave a tp rank without a query head (5 on 4)",
            "the tp the message names; 14 query and 2 key-value heads on 4 work, and cp takes any heads", [
        made(lambda ctx: tpattn.ParallelSelfAttention(8, 1, 1, ctx=ctx), "1 query heads", "tp=2", "could be 1", axis="tp"),
        made(lambda ctx: tpattn.QKVParallelLinear(12, 1, head_dim=4, ctx=ctx), "[1, 0]", "tp=2", "could be 1", axis="tp"),
    ]),
    Refusal("`kv_heads` that does not name an ascending key head for each query head", "the shapes in the message", [
        attention("kv_heads must name", "[0, 0, 1]", kv_heads=[0, 0, 1]),
        attention("kv_heads must name", "[0, 1, 0, 1]", kv_heads=[0, 1, 0, 1]),
    ]),
    Refusal("a whole sequence where a share is due, when a layout is given; without one, k and v as long on every rank as all "
            "queries together", "`ctx.cp.shard(x, layout)`", [
        attention("q has 8 tokens", "4 of 8", "ctx.cp.shard(q, layout, dim=1)", q=WHOLE, k=WHOLE, v=WHOLE),
        attention("k has 8 tokens", "4 of 8", "ctx.cp.shard(k, layout, dim=1)", k=WHOLE, v=WHOLE),
        attention("has 8 keys", "queries on all ranks", "ctx.cp.shard(k, layout, dim=1)", layout=None, k=WHOLE, v=WHOLE)._replace(
            sends=("all_gather",)),
        made(lambda ctx: tpattn.ParallelSelfAttention(8, 2, ctx=ctx)(torch.ones(2, 8, 8), layout=LAYOUT),
             "got 8 tokens (the whole", "4 of 8", "ctx.cp.shard(x, layout, dim=1)")._replace(sends=("all_gather",)),
        made(lambda ctx: tpattn.TransformerBlock(8, 2, ctx=ctx)(torch.ones(2, 8, 8), layout=LAYOUT),
             "got 8 tokens (the whole", "4 of 8", "ctx.cp.shard(x, layout, dim=1)")._replace(sends=("all_gather",)),
    ]),
    Refusal("a layout for other ranks or lengths; `of` with a position held twice or by nobody",
            "`n=ctx.cp.size`, T of the whole sequence", [
        attention("4 ranks", "cp=2", "n=2", layout=SequenceLayout.zigzag(8, 4)),
        attention("kv_layout", "3 ranks", "n=2", kv_layout=SequenceLayout.contiguous(8, 3)),
        attention("q has 4 tokens", "8 of 16", "ctx.cp.shard", layout=SequenceLayout.zigzag(16, 2)),
        attention("k has 4 tokens", "6 of 12", "ctx.cp.shard", kv_layout=SequenceLayout.contiguous(12, 2)),
        attention("layout", "str", "SequenceLayout, or None", layout="zigzag"),
        attention("kv_layout", "list", "SequenceLayout, or None", kv_layout=[4, 4]),
        made(lambda ctx: SequenceLayout.of([[0, 1], [1]]), "held twice [1]", "by nobody [2]", "to exactly one rank"),
        made(lambda ctx: SequenceLayout.contiguous(-1, 2), "T=-1", "at least 0"),
        made(lambda ctx: SequenceLayout.striped(8, 2, block=0), "block=0", "at least 1"),
    ]),
    Refusal("q, k, v that are no plain [B, tokens, heads, head_dim] of one floating-point dtype and device; key heads that do "
            "not divide the query heads", "`x.to_local()`, `k.to(q)`, the shapes in the message", [
        attention("q must be", "[B, tokens, heads, head_dim]", "[2, 4, 24]", q=torch.ones(2, 4, 24)),
        attention("q must be", "[B, tokens, heads, head_dim]", "list", q=[1.0]),
        attention("k [1, 4, 2, 6]", "k [B, s, K, D]", k=KV[:1], v=KV[:1]),
        attention("k [2, 4, 2, 5]", "k [B, s, K, D]", k=KV[..., :5]),
        attention("v [2, 3, 2, 6]", "v [B, s, K, Dv]", v=KV[:, :3]),
        attention("k [2, 4, 3, 6]", "must divide", k=torch.ones(2, 4, 3, 6), v=torch.ones(2, 4, 3, 6)),
        attention("q [2, 4, 0, 6]", "may be 0", q=Q[:, :, :0]),
        attention("float64 cpu for v", "must share dtype", "v.to(q)", v=KV.double()),
        attention("4 tokens", "[B, heads, tokens, head_dim]", "q.transpose(1, 2)", layout=SequenceLayout.zigzag(16, 2),
                  q=torch.ones(2, 4, 8, 6), k=torch.ones(2, 2, 8, 6), v=torch.ones(2, 2, 8, 6)),
        attention("int64", "not supported", "bfloat16", q=Q.long(), k=KV.long(), v=KV.long()),
        Call(d_tensor, ("k is a DTensor", "plain tensor", "k.to_local()")),
    ]),
    Refusal("additive masks, masks as bare tensors or words", "`masks.dense(bool)`, `masks.padding(valid)`, `masks.causal() & "
            "masks.window(left=512)`, ...", [
        attention("Tensor", "tpattn.masks", "masks.dense(x)", mask=bools(4, 8)),
        attention("Tensor", "additive masks are not supported", "masks.padding(valid)", mask=torch.zeros(4, 8)),
        attention("str", "tpattn.masks", "masks.dense(x)", mask="causal"),
        made(lambda ctx: masks.dense(torch.zeros(4, 8)), "float32 [4, 8]", "bool", "masks.dense(additive == 0)"),
        made(lambda ctx: masks.padding(torch.ones(2, 8)), "float32 [2, 8]", "bool [B, S]", "True for real keys"),
        made(lambda ctx: masks.causal() & bools(4, 8), "Tensor", "another mask", "masks.dense(x)"),
    ]),
    Refusal("a mask that does not fit the call: other keys, rows, heads or batch, negative or fractional numbers",
            "all keys, own rows: `ctx.cp.shard(table, layout, dim=-2)`", [
        attention("[1, 1, 8, 8]", "t=4", "ctx.cp.shard(mask, layout, dim=-2)", mask=masks.dense(bools(8, 8))),
        attention("[1, 1, 4, 4]", "S=8", "key columns", mask=masks.dense(bools(4, 4))),
        attention("[2, 2, 4, 8]", "H=4", "[B, H, t, S]", mask=masks.dense(bools(2, 2, 4, 8))),
        attention("[1, 1, 4, 4]", "S=8", "key columns", mask=masks.causal() & masks.dense(bools(4, 4))),
        made(lambda ctx: masks.dense(bools(2, 4, 8)), "[2, 4, 8]", "[t, S], [B, 1, t, S] or [B, H, t, S]"),
        attention("[2, 4]", "[2, 8]", "all keys", mask=masks.padding(bools(2, 4))),
        attention("sum to 9", "8 keys", "of the whole sequence", mask=masks.documents([9])),
        attention("3 lists", "batch of 2", "give one, or one for each", mask=masks.documents([[8], [8], [8]])),
        made(lambda ctx: masks.documents(torch.tensor([4, 4])), "Tensor", "list of lengths", "one list per batch element"),
        made(lambda ctx: masks.documents([4, -1]), "length -1", "integer >= 0"),
        made(lambda ctx: masks.window(1.5), "left=1.5", "integer >= 0", "None (no limit)"),
        made(lambda ctx: masks.prefix(-1), "n=-1", "integer >= 0"),
        Call(other_forms, ("other batch and head dimensions", "(1, 1), (2, 4)", "[B, H, t, S] alike"), sends=("all_gather",)),
    ]),
    Refusal("another word for `grid`, `transport`, `kernel`; a kernel that cannot compute there", "the message lists them", [
        attention("grid='ring'", "AttentionGrid(ulysses=, ring=, merge=)", "auto", grid="ring"),
        attention("transport='rotat'", "not known", "auto, exchange and rotate", transport="rotat"),
        attention("transport=None", "not known", "auto, exchange and rotate", transport=None),
        attention("kernel='flash'", "not known", "auto, cpu_flash", kernel="flash"),
        attention("kernel='cuda_flash'", "float32 on cpu", "there are auto, cpu_flash, math", kernel="cuda_flash"),
        made(lambda ctx: tpattn.ParallelSelfAttention(8, 2, ctx=ctx, transport="zz"), "transport='zz'", "exchange and rotate"),
        made(lambda ctx: tpattn.TransformerBlock(8, 2, ctx=ctx, kernel="zz"), "kernel='zz'", "auto, cpu_flash"),
    ]),
    Refusal("`scale`, `softcap`, `alibi_slopes`, `sinks`, `dropout` out of range or shape", "those in the message", [
        attention("scale='half'", "finite number", "None for head_dim ** -0.5", scale="half"),
        attention("scale=nan", "finite number", "None for head_dim ** -0.5", scale=float("nan")),
        attention("softcap=-1.0", "positive number", "None", softcap=-1.0),
        attention("softcap=inf", "positive number", "None", softcap=float("inf")),
        attention("softcap='30'", "positive number", "None", softcap="30"),
        attention("[3]", "alibi_slopes must be a float tensor", "[H] = [4]", alibi_slopes=torch.ones(3)),
        attention("int64 [4]", "sinks must be a float tensor", "[H] = [4]", sinks=torch.ones(4, dtype=torch.int64)),
        attention("list", "sinks must be a float tensor", "[H] = [4]", sinks=[0.0] * 4),
        attention("(1.0, RandomKey)", "in [0, 1)", "(p, RandomKey)", dropout=(1.0, KEY)),
        attention("(0.1, int)", "in [0, 1)", "(p, RandomKey)", dropout=(0.1, 5)),
        attention("(0.1, NoneType)", "in [0, 1)", "(p, RandomKey)", dropout=0.1),
        attention("('a', RandomKey)", "in [0, 1)", "(p, RandomKey)", dropout=("a", KEY)),
    ]),
    Refusal("`deterministic=True` with other edges than multiples of 256, with `rotate` or a merge leg",
            "`block=256` in the layout, `exchange`, `merge=1`", [
        deterministic("T=1100", "multiples of 256", "block=256", layout=SequenceLayout.contiguous(1100, 2)),
        deterministic("rotate", "needs transport exchange", layout=BLOCK, transport="rotate", grid=AttentionGrid(ring=2)),
        deterministic("merge=2", "a grid with merge=1", layout=BLOCK, grid=AttentionGrid(merge=2)),
    ]),
    Refusal('`softcap`, ALiBi or dropout with `kernel="cpu_flash"`', '`kernel="auto"` takes `math` for them', [
        attention("kernel='cpu_flash'", "with softcap, ALiBi or dropout", "there are auto, math", kernel="cpu_flash", **change)
        for change in ({"softcap": 2.0}, {"alibi_slopes": torch.ones(4)}, {"dropout": (0.1, KEY)})
    ]),
    Refusal("odd `head_dim` with rotary embedding", "`rope_base=None`, or an even one", [
        made(lambda ctx: tpattn.ParallelSelfAttention(6, 2, ctx=ctx), "head_dim=3", "must be even", "rope_base=None"),
        made(lambda ctx: tpattn.TransformerBlock(6, 2, ctx=ctx), "head_dim=3", "must be even", "rope_base=None"),
    ]),
    Refusal('`reduction="mean"` of the loss', "`token_mean`: means of means are wrong when ranks hold other numbers of tokens", [
        made(lambda ctx: tpattn.vocab_parallel_cross_entropy(
            torch.zeros(2, 4), torch.zeros(2).long(), ctx=ctx, vocab_size=8, reduction="mean"),
             "reduction='mean'", "none or sum", "token_mean", axis="tp"),
    ]),
    Refusal('`reduction="none"` with a gradient in `linear_cross_entropy`',
            "`vocab_parallel_cross_entropy`; `token_weight` for fixed factors", [
        made(lambda ctx: tpattn.linear_cross_entropy(
            torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3), torch.zeros(2).long(), ctx=ctx, vocab_size=8,
            reduction="none"), "reduction='none' has no gradient", "token_weight", axis="tp"),
    ]),
    Refusal("`zero_grad(set_to_none=False)` after partial gradients", "`zero_grad()` as torch's default has it", [
        Call(kept_zeros, ("finish_gradients", "once per step", "set_to_none=True"), error=TpattnError, sends=("all_reduce",)),
    ]),
    Refusal("`shard` of a model without tpattn layers or of another context, of one that is divided already or has no forward; "
            "`units=` outside the model; torch's own `fully_shard`",
            "`tpattn.shard(model, ctx)`, once, of the module that is called", [
        divided("needs a model with tpattn layers", "0 contexts", build=lambda ctx, change: torch.nn.Linear(4, 4)),
        divided("1 contexts", "not of this one", build=lambda ctx, change: Net(ParallelContext.single())),
        divided("divided by FSDP2 already", "once", build=lambda ctx, change: tpattn.shard(Net(ctx), ctx)),
        divided("ModuleList without a forward", "inside a model", build=lambda ctx, change: torch.nn.ModuleList([Net(ctx)])),
        divided("list is a ModuleList", "without a forward", "units=", units=lambda net: [net.list]),
        divided("Linear is no part of the model", "inside it", units=lambda net: [torch.nn.Linear(4, 4)]),
        made(by_fully_shard, "torch's fully_shard", "tpattn.shard(model, ctx)"),
    ]),
    Refusal("`shard` of a weight without dimensions, empty, not contiguous or in two units; two trainable dtypes in one unit",
            "shape [1], a buffer, `.contiguous()`, other `units=`", [
        divided("own has no dimension", "shape [1]", change=parameter(lambda: torch.ones(()))),
        divided("own [0, 3] has no elements", "buffer", change=parameter(lambda: torch.ones(0, 3))),
        divided("own [3, 2] is not contiguous", ".contiguous()", change=parameter(lambda: torch.ones(2, 3).t())),
        divided("more.weight and list.0.weight are one parameter in two units", "the same one", units=lambda net: net.list,
                change=lambda net: setattr(net.list[0], "weight", net.more.weight)),
        divided("bfloat16, float32", "one dtype per unit", "units=", change=lambda net: net.more.bfloat16()),
    ]),
    Refusal("a weight used while FSDP2 has divided it", "call its unit, name the method in `methods=`", [
        made(lambda ctx: tpattn.shard(Net(ctx), ctx).norm(torch.ones(2, 4)), "RMSNorm.weight is used while", "methods="),
    ]),
    Refusal("an optimizer made before `shard`; a last backward inside `no_sync`", "make it after; the last one outside", [
        Call(early_optimizer, ("no longer the model's", "make the optimizer after tpattn.shard"), error=TpattnError,
             sends=("all_reduce",)),
        Call(all_inside_no_sync, ("norm.weight was not reduced", "outside tpattn.no_sync"), error=TpattnError),
    ]),
    Refusal("torch's `DistributedDataParallel` around a model", "the model itself, or `tpattn.shard`", [
        made(lambda ctx: tpattn.finish_gradients(
            torch.nn.parallel.DistributedDataParallel(tpattn.ColumnParallelLinear(4, 4, ctx=ctx))),
            "DistributedDataParallel averages", "pass the model itself")._replace(sends=("all_gather",)),   # the layer's seed
    ]),
    Refusal("a group or layer of a closed context", "a new `ParallelContext`", [
        closed(lambda gone, norm: norm(torch.ones(2, 4))),
        closed(lambda gone, norm: tpattn.ColumnParallelLinear(4, 4, ctx=gone)),
        closed(lambda gone, norm: tpattn.sequence_attention(Q, KV, KV, ctx=gone)),
    ]),
]


@ranks(2)
@pytest.mark.parametrize("row", range(len(REFUSED)), ids=[r.what.replace("`", "")[:24] for r in REFUSED])
def test_each_call_of_the_table_is_refused_on_every_rank_before_anything_is_sent(rank, world, row):
    """One named error with the value, the need and the remedy. Without a layout the lengths are agreed first, no more is sent."""
    for i, call in enumerate(REFUSED[row].calls):
        for act, sends in ((call.act, call.sends), (call.bare, ("all_gather",))):
            if act is not None:
                with ParallelContext.from_env(**{call.axis: 2}, timeout=60) as ctx, ledger() as book:
                    with pytest.raises(call.error) as error:
                        act(ctx, rank)
                assert type(error.value) is call.error, f"call {i}: {error.value!r}"
                missing = [word for word in call.words if word not in str(error.value)]
                assert not missing, f"call {i}: {missing} not in: {error.value}"
                sent = {m.operation for m in book.messages}
                assert sent <= set(sends) and len(book.messages) <= 2, f"call {i} sent {book}"


@ranks(2)
def test_the_test_would_see_a_call_that_is_accepted_or_sends_first(rank, world):
    """The unchanged call is not refused; with what it sends no row would pass."""
    with ParallelContext.from_env(cp=2, timeout=60) as ctx, ledger() as book:
        attention().act(ctx, rank)
        attention().bare(ctx, rank)
    assert [m.operation for m in book.messages] == ["exchange", "all_gather", "exchange"]


def test_the_readme_holds_the_table():
    """Generated from the list above; `python tests/test_refusals.py` rewrites it."""
    assert tables.in_readme(NAME) == generated()


def generated():
    """The table in Markdown."""
    return tables.table(["refused", "instead"], [[r.what, r.instead] for r in REFUSED])


if __name__ == "__main__":
    tables.write(NAME, generated())
