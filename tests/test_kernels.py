"""Local attention equals plain softmax for every tile, backend and dtype; its backward works from the global (out, lse)."""

import pytest
import torch
from helpers import close, far, seeded
from oracle import attention_and_gradients

from tpattn import Unsupported, kernels
from tpattn.kernels import (
    Accumulator,
    Change,
    Gradients,
    HeadByHead,
    Tile,
    Total,
    attend,
    attend_backward,
    backends,
    choose,
    merge,
    stand_in,
)

BACKENDS = ["cpu_flash", "math"]
CPU = torch.device("cpu")


def problem(B, T, S, H, K, D, E, dtype=torch.float64, seed=0):
    """q, k, v and upstream gradient in kernel order [B, H, T, D], as views of the public order [B, T, H, D]."""
    shapes = (B, T, H, D), (B, S, K, D), (B, S, K, E), (B, T, H, E)
    return [seeded(*shape, seed=seed + i, dtype=dtype).transpose(1, 2) for i, shape in enumerate(shapes)]


def whole(backend, q, k, v, g, tiles, scale=None, table=None, blocks=None):
    """[out, lse, dq, dk, dv] in public order by `attend` over blocks of keys, then `attend_backward` from the global results."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    H, K = q.shape[1], k.shape[1]
    groups = [(slice(0, H), slice(0, K))]
    into = Accumulator(q.shape[:3], v.shape[-1], q)
    cuts = blocks or [(slice(0, k.shape[2]), tiles)]
    backend = choose(backend, q.device, q.dtype)
    for keys, here in cuts:
        part = None if table is None else table[..., keys]
        attend(into, q, k[:, :, keys], v[:, :, keys], here, groups, scale, backend, part)
    out = into.out.to(q.dtype)
    dq, dk, dv = (Total(x) for x in (q, k, v))
    for keys, here in cuts:
        part = None if table is None else table[..., keys]
        some = Gradients(dq, Total(k[:, :, keys]), Total(v[:, :, keys]))
        attend_backward(some, q, k[:, :, keys], v[:, :, keys], g, out, into.lse, here, groups, scale, backend, part)
        dk.value[:, :, keys] += some.dk.value
        dv.value[:, :, keys] += some.dv.value
    return [x.transpose(1, 2) for x in (out, into.lse, dq.value, dk.value, dv.value)]


def allowed_of(tiles, T, S, table=None):
    """bool [b, h, T, S] of what the tiles count."""
    allowed = torch.zeros(1, 1, T, S, dtype=torch.bool)
    for t in tiles:
        i, j, side = torch.arange(t.rows)[:, None], torch.arange(t.keys)[None], t.side or 1
        inside = (j >= t.lo[:, None]) & (j < t.hi[:, None]) if t.kind == "ragged" else \
            {"full": i + j >= 0, "causal": j <= i, "flipped": j >= i}[t.kind] & (i // side == j // side if t.side else True)
        allowed[..., t.row : t.row + t.rows, t.key : t.key + t.keys] |= inside
    return allowed if table is None else allowed & table


def check(backend, inputs, tiles, scale=None, table=None, blocks=None, everything=None):
    q, k, v, g = inputs
    T, S = q.shape[2], k.shape[2]
    allowed = allowed_of(everything or tiles, T, S, table)
    want = attention_and_gradients(*(x.transpose(1, 2) for x in inputs), allowed, scale)
    got = whole(backend, *inputs, tiles, scale, table, blocks)
    for name, mine, theirs in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        try:
            close(mine, theirs)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    return got, want


def band(rows, S, left, right, seed=None):
    """A ragged tile: row i reads [i - left, i + right], or random limits with a seed."""
    i = torch.arange(rows)
    lo, hi = (i - left).clamp(0, S), (i + right + 1).clamp(0, S)
    if seed is not None:
        lo, hi = torch.randint(0, S + 1, (2, rows), generator=torch.Generator().manual_seed(seed)).sort(dim=0).values
    return Tile("ragged", 0, rows, 0, S, lo, torch.maximum(lo, hi))


TILES = {
    "full": lambda T, S: [Tile("full", 0, T, 0, S)],
    "part": lambda T, S: [Tile("full", 1, T - 2, 2, S - 3)] * (T > 2),      # some rows and keys have nothing
    "causal": lambda T, S: [Tile("causal", 0, T, 0, T)],
    "flipped": lambda T, S: [Tile("flipped", 0, T, 0, T)],
    "squares": lambda T, S: [Tile("causal", 0, T, 0, T, side=8)],
    "flipped squares": lambda T, S: [Tile("flipped", 0, T, 0, T, side=256)],
    "ragged": lambda T, S: [band(T, S, 5, 3)],
    "random": lambda T, S: [band(T, S, 0, 0, seed=1)],
    "two squares": lambda T, S: [Tile("causal", 0, T // 2, 3, T // 2), Tile("flipped", T // 2, T // 2, 1, T // 2)] * (T > 2),
    "none": lambda T, S: [],
}


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 37, 300])
def test_every_kind_of_tile(backend, kind, T):
    """Forward and backward, for one row, for a tile below one leaf and for one that becomes a ragged binary tree."""
    check(backend, problem(1, T, T + 7, 4, 2, 8, 8), TILES[kind](T, T + 7))


@pytest.mark.parametrize("kind", ["causal", "flipped"])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("T", [127, 128, 129, 256, 257, 385, 512, 700])
def test_causal_squares_of_any_side(kind, B, T):
    """The binary tree covers each pair once whatever is left over; a batch of one takes strided windows, larger ones do not."""
    check("cpu_flash", problem(B, T, T, 2, 1, 4, 4), TILES[kind](T, T))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("H", "K"), [(6, 6), (6, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize(("D", "E"), [(8, 8), (4, 12), (12, 4), (1, 1), (3, 5)])
def test_heads_and_widths(backend, H, K, D, E):
    """Grouped heads, odd widths, and Dv != D in both directions (the op wants them equal and is given zeros)."""
    got, want = check(backend, problem(3, 33, 41, H, K, D, E), [Tile("full", 0, 33, 0, 40)])
    if H // K > 1 and K > 1:        # query head i reads key head i // (H // K), not i % K
        q, k, v, g = problem(3, 33, 41, H, K, D, E)
        order = [h % K for h in range(H)]
        wrong = attention_and_gradients(q.transpose(1, 2), k[:, order, :40].transpose(1, 2), v[:, order, :40].transpose(1, 2),
                                        g.transpose(1, 2))
        far(got[0], wrong[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.37, 1.0, -0.5, 0.0, 30.0])
def test_scale(backend, scale):
    """C33: any scale, forward and backward, through masked tiles and causal ones."""
    inputs = problem(2, 40, 40, 4, 2, 6, 6)
    for kind in ("causal", "ragged"):
        got, _ = check(backend, inputs, TILES[kind](40, 40), scale)
        far(got[0], attention_and_gradients(*(x.transpose(1, 2) for x in inputs), allowed_of(TILES[kind](40, 40), 40, 40))[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (3, 4), (1, 4)])
def test_a_dense_table(backend, shape):
    """A table for all, per sequence, per head or both, with empty rows and with a tile that is wholly allowed or wholly not."""
    T, S, (b, h) = 20, 30, shape
    table = torch.rand(b, h, T, S, generator=torch.Generator().manual_seed(3)) < 0.4
    table[..., 4, :] = False
    table[..., 10:, :15] = True
    table[..., :10, 15:] = False
    inputs = problem(3, T, S, 4, 2, 8, 8)
    limits = band(T, S, 30, 8)
    one = [Tile("ragged", 0, T, 0, S, limits.lo, limits.hi, table=True)]
    four = [Tile("full", row, 10, key, 15, table=True) for row in (0, 10) for key in (0, 15)]
    for tiles in (one, four):
        got, _ = check(backend, inputs, tiles, table=table)
        assert (got[0][:, 4] == 0).all() and (got[1][:, 4] == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_keys_give_zero_and_minus_infinity(backend):
    """C19: never nan, whether a tile masks the row, no tile reaches it, or it meets many empty blocks; gradients are 0."""
    q, k, v, g = inputs = problem(2, 9, 12, 4, 2, 8, 8)
    lo = torch.tensor([0, 3, 3, 0, 5, 12, 0, 1, 2])
    hi = torch.tensor([4, 3, 9, 0, 6, 12, 12, 1, 3])
    tiles = [Tile("ragged", 0, 9, 0, 12, lo, hi)]
    got, _ = check(backend, inputs, tiles)
    empty = lo == hi
    assert (got[0][:, empty] == 0).all() and (got[1][:, empty] == -torch.inf).all() and (got[2][:, empty] == 0).all()
    assert all(torch.isfinite(x).all() for x in (got[0], *got[2:]))
    blocks = [(slice(s, s + 4), [Tile("ragged", 0, 9, 0, 4, (lo - s).clamp(0, 4), (hi - s).clamp(0, 4))]) for s in (0, 4, 8)]
    check(backend, inputs, tiles, blocks=blocks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", [1, 13, 30])
def test_backward_of_two_key_blocks_from_the_global_results(backend, cut):
    """Two blocks of keys merged by lse equal one; the backward of each takes the (out, lse) of the whole row, not its own."""
    T, S = 25, 31
    q, k, v, g = inputs = problem(2, T, S, 4, 2, 8, 6)
    blocks = [(slice(0, cut), [Tile("full", 0, T, 0, cut)]), (slice(cut, S), [Tile("full", 0, T, 0, S - cut)])]
    got, want = check(backend, inputs, None, blocks=blocks, everything=[Tile("full", 0, T, 0, S)])
    own = whole(backend, q, k[:, :, :cut], v[:, :, :cut], g, [Tile("full", 0, T, 0, cut)])      # the likely mistake: local lse
    far(own[3], want[3][:, :cut])
    far(own[0], want[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_merging_in_any_order_and_with_nothing(backend):
    """Blocks in reverse, and an accumulator that met nothing merged before, between and behind: the same result."""
    inputs = problem(1, 10, 24, 2, 2, 4, 4)
    cuts = [(slice(s, s + 6), [Tile("full", 0, 10, 0, 6)]) for s in (0, 6, 12, 18)]
    check(backend, inputs, None, blocks=cuts[::-1], everything=[Tile("full", 0, 10, 0, 24)])
    total, lse = seeded(2, 3, 4, seed=1), seeded(2, 3, seed=2)
    nothing, none = torch.zeros(2, 3, 4, dtype=torch.float64), torch.full((2, 3), -torch.inf, dtype=torch.float64)
    some, no = (total, lse), (nothing, none)
    for pair in ([some, no], [no, some], [no, some, no]):
        out, out_lse = pair[0][0].clone(), pair[0][1].clone()
        for other in pair[1:]:
            merge(out, out_lse, *other)
        close(out, total)
        close(out_lse, lse)
    empty, empty_lse = nothing.clone(), none.clone()
    merge(empty, empty_lse, nothing, none)
    assert (empty == 0).all() and (empty_lse == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("far_apart", [50.0, 2000.0])
def test_merging_blocks_of_very_different_size(backend, far_apart):
    """Scores that differ by thousands between blocks: exp never overflows and the smaller block gives 0, not nan."""
    q, k, v, g = inputs = problem(1, 6, 8, 2, 2, 4, 4)
    k[:, :, 4:] *= far_apart
    blocks = [(slice(0, 4), [Tile("full", 0, 6, 0, 4)]), (slice(4, 8), [Tile("full", 0, 6, 0, 4)])]
    check(backend, inputs, None, blocks=blocks, everything=[Tile("full", 0, 6, 0, 8)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["full", "causal", "flipped", "random"])
@pytest.mark.parametrize("fast", [True, False])
def test_low_precision_errs_no_more_than_the_undivided_op(monkeypatch, backend, dtype, kind, fast):
    """Sums in float32: at most 1.5 times the error of one call over all keys, on CPUs with and without that dtype."""
    monkeypatch.setattr(backends, "fast_on_cpu", lambda _: fast)
    T = 200
    inputs = problem(1, T, T, 4, 2, 16, 16, dtype)
    tiles = TILES[kind](T, T)
    allowed = allowed_of(tiles, T, T)
    want = attention_and_gradients(*(x.transpose(1, 2) for x in inputs), allowed)
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    some = allowed.any(-1, keepdim=True)
    serial = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed | ~some, enable_gqa=True) * some
    yardstick = [serial.detach(), None, *torch.autograd.grad(serial, (q, k, v), inputs[3])]
    got = whole(backend, *inputs, tiles)
    assert got[0].dtype == dtype and got[1].dtype == got[2].dtype == torch.float32
    for name, mine, theirs, other in zip(("out", "lse", "dq", "dk", "dv"), got, want, yardstick, strict=True):
        if other is None:
            close(mine, theirs, 4e-3 if dtype != torch.float32 else None)
            continue
        error, allowance = ((x.double() - theirs).abs().max() for x in (mine.to(dtype), other.transpose(1, 2)))
        assert error <= 1.5 * allowance + 1e-6, f"{name}: {error:.3g}, the undivided op errs by {allowance:.3g}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_inputs_do_not_matter(backend):
    """C06: transposed, sliced, reversed in memory, and an expanded upstream gradient, as sum() gives it."""
    T, S = 150, 150
    tiles = TILES["causal"](T, S)
    base = problem(1, T, S, 4, 2, 8, 8)
    q = seeded(1, 4, T, 16, seed=0)[..., ::2]
    k = seeded(8, S, 2, 1, seed=1).permute(3, 2, 1, 0)
    g = torch.ones((), dtype=torch.float64).expand(1, 4, T, 8)
    same_key = base[1][:, :, :1].expand_as(base[1])
    for inputs in ([q, *base[1:]], [base[0], k, *base[2:]], [*base[:3], g], [base[0], same_key, *base[2:]]):
        check(backend, inputs, tiles)


def test_the_op_never_meets_an_empty_tensor(monkeypatch):
    """An empty q or k kills the process inside the op (torch 2.13): no tile, head group or batch gets there with size 0."""
    seen = []
    for name in ("forward", "backward"):
        real = getattr(backends.CpuFlash, name)

        def spy(self, *tensors, real=real):
            seen.append([x.numel() for x in tensors if isinstance(x, torch.Tensor)])
            assert all(seen[-1]), "an empty tensor reached the op"
            return real(self, *tensors)

        monkeypatch.setattr(backends.CpuFlash, name, spy)
    for T, S in ((0, 5), (5, 0), (0, 0)):
        got = whole("cpu_flash", *problem(2, T, S, 4, 2, 8, 8), [])
        assert (got[0] == 0).all() and (got[1] == -torch.inf).all()
    dark = torch.zeros(1, 1, 5, 5, dtype=torch.bool)
    whole("cpu_flash", *problem(2, 5, 5, 4, 2, 8, 8), [Tile("full", 0, 5, 0, 5, table=True)], table=dark)
    assert not seen
    whole("cpu_flash", *problem(2, 5, 5, 4, 2, 8, 8), TILES["causal"](5, 5))
    assert len(seen) == 2


def test_large_problems_are_computed_in_blocks(monkeypatch):
    """The math backend bounds its block of scores: the same numbers with room for 50 scores at a time."""
    monkeypatch.setattr(backends.Math, "_most_scores", 50)
    inputs = problem(2, 13, 11, 4, 2, 6, 6)
    check("math", inputs, TILES["ragged"](13, 11))
    check("math", inputs, [Tile("full", 0, 13, 0, 11, table=True)], table=torch.rand(2, 4, 13, 11) < 0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_stand_in_has_the_row_sums_that_backward_needs(dtype):
    """A tensor whose product with g sums to delta in each row, to the square of its rounding; rows of g = 0 get 0.

    Merged outputs need it that exact: where a row has one key, delta cancels and the gradient is 0.
    """
    g, delta = seeded(2, 3, 7, 5, seed=0, dtype=dtype), seeded(2, 3, 7, seed=1)
    g[0, 1, 2] = 0
    o = stand_in(g, delta)
    assert o.dtype == dtype and o.isfinite().all()
    want = torch.where(g.abs().sum(-1) == 0, 0.0, delta)
    tol = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 3e-5}[dtype]
    close((g.double() * o.double()).sum(-1), want, tol)
    expanded = torch.ones((), dtype=dtype).expand(2, 3, 7, 5)
    close((expanded.double() * stand_in(expanded, delta).double()).sum(-1), delta, tol)
    g[..., 1:] = torch.finfo(dtype).tiny    # the second largest is too small to take part
    assert stand_in(g, delta).isfinite().all()
    close((g[..., :1].double() * stand_in(g[..., :1], delta).double()).sum(-1), want * (g[..., 0] != 0), 8e-3)


@pytest.mark.parametrize("name", BACKENDS)
def test_head_by_head_a_head_has_the_bits_that_it_has_alone(name):
    """Whatever heads come with it, and whatever strides and alignment: odd widths, few rows, masks and changes of each head."""
    plain = choose(name, CPU, torch.float32)
    backend = HeadByHead(plain)
    for T, D, each in ((2, 1, False), (45, 5, False), (256, 5, True), (33, 8, True)):
        q, k, v, g = problem(2, T, 300, 6, 3, D, D, torch.float32, seed=T)
        out, lse = seeded(2, T, 6, D, seed=8).float().transpose(1, 2), seeded(2, 6, T, seed=9).float() + 6
        mask = torch.rand(2, 6, T, 300, generator=torch.Generator().manual_seed(T)) < 0.7 if each else None
        change = None
        if name == "math":
            at = torch.arange(T)[None], torch.arange(300)[None], torch.arange(2), torch.arange(6)
            change = Change(1.3, seeded(6, seed=3).abs(), 0.2, 5, *at)
        every = backend.forward(q, k, v, mask, 0.3, change), backend.backward(g, q, k, v, out, lse, mask, 0.3, change)
        close(every[0], plain.forward(q, k, v, mask, 0.3, change))
        close(every[1], plain.backward(g, q, k, v, out, lse, mask, 0.3, change))
        for i in range(6):
            one, kv = slice(i, i + 1), slice(i // 2, i // 2 + 1)
            part = None if mask is None else mask[:, one]
            its = None if change is None else change.of_heads(one)
            alone = plain.forward(*(x.contiguous() for x in (q[:, one], k[:, kv], v[:, kv])), part, 0.3, its)
            assert all(torch.equal(a[:, one], b) for a, b in zip(every[0], alone, strict=True)), (T, D, i)
            rows = (x[:, one].contiguous() for x in (out, lse))
            alone = backend.backward(g[:, one], q[:, one], k[:, kv], v[:, kv], *rows, part, 0.3, its)
            assert torch.equal(every[1][0][:, one], alone[0]), (T, D, i)


def test_outputs_of_math_are_not_rounded_before_they_are_merged():
    """A row that is the sum of nine calls in bfloat16 errs as little as in one call: rounded once, at its end."""
    q, k, v, g = problem(1, 40, 90, 2, 2, 8, 8, torch.bfloat16)
    tiles = [Tile("full", 0, 40, 0, 10)]
    blocks = [(slice(i, i + 10), tiles) for i in range(0, 90, 10)]
    many, once = (whole("math", q, k, v, g, [Tile("full", 0, 40, 0, 90)], blocks=x)[0] for x in (blocks, None))
    assert (many != once).double().mean() < 0.02


def test_backends_are_chosen_by_name_or_refused():
    assert list(kernels.available()) == BACKENDS and list(kernels.available(dtype=torch.bfloat16)) == BACKENDS
    assert choose("auto", CPU, torch.float32).name == "cpu_flash" and choose("math", CPU, torch.float32).name == "math"
    on_cuda = kernels.available("cuda", torch.bfloat16)
    assert list(on_cuda) == ["cuda_flash", "cuda_efficient", "math"]
    assert ["never run" in note for note in on_cuda.values()] == [True, True, False]
    cuda = torch.device("cuda")
    assert list(kernels.available("cuda")) == ["cuda_efficient", "math"]
    assert choose("auto", cuda, torch.bfloat16).name == "math" and choose("cuda_flash", cuda, torch.bfloat16).name == "cuda_flash"
    for name, device, dtype, words in (
        ("flash", CPU, torch.float32, ["kernel='flash'", "cpu_flash", "math"]),
        ("cpu_flash", torch.device("cuda"), torch.float32, ["cuda", "math"]),
        ("auto", CPU, torch.int64, ["int64", "bfloat16"]),
        ("auto", CPU, torch.complex64, ["complex64"]),
        ("cuda_flash", cuda, torch.float32, ["float32", "cuda_efficient, math"]),
        ("cuda_flash", cuda, torch.float16, ["head_dim 300", "cuda_efficient, math"]),
    ):
        with pytest.raises(Unsupported) as error:
            choose(name, device, dtype, width=300 if "300" in words[0] else 64)
        assert all(word in str(error.value) for word in words), str(error.value)
