"""What the tests compare with: `close`, its counterpart `far`, and `seeded`, which makes the same tensor on every rank.

Also `every_way`: the options of sequence_attention that must not change its numbers.
"""

import torch

from tpattn import AttentionGrid

# dtype of what was computed -> (tolerance, floor). The tolerance is relative to the largest value of what is wanted; where that
# is below the floor, values are what is left of terms of size one that cancelled, and the floor takes its place.
TOLERANCES = {
    torch.float64: (1e-10, 1.0), torch.complex128: (1e-10, 1.0),
    torch.float32: (1e-5, 1e-2), torch.complex64: (1e-5, 1e-2),
}


def close(got, want, tol=None):
    """Assert that `got` equals `want` within tol times the largest value of want; the message tells the worst place.

    got, want   tensors of one shape, numbers, or equally long lists or tuples of them; their dtypes may differ
    tol         default by the dtype of got: 1e-10 for float64, 1e-5 for float32, exact for integers and bools. bfloat16 and
                float16 have none: say what the undivided computation errs. tol=0 is exact.
    Infinities must stand in the same places; nan is never close.
    """
    if isinstance(want, list | tuple):
        assert len(got) == len(want), f"{len(got)} values, {len(want)} wanted"
        for mine, theirs in zip(got, want, strict=True):
            close(mine, theirs, tol)
        return
    difference, scale, tol, got, want = _compare(got, want, tol)
    worst = difference.max().item() if difference.numel() else 0.0
    if worst > tol * scale:
        raise AssertionError(_describe(difference, got, want) + f", allowed {tol * scale:.3g} (tol {tol:g} of {scale:.3g})")


def far(got, want, share=1e-3):
    """Assert that `got` is clearly not `want`: somewhere they differ by more than `share` of the largest value of want.

    Put it next to `close`, with the answer that the likely mistake would give: it shows that the test can fail.
    """
    difference, _, _, got, want = _compare(got, want, 0.0)
    scale = _finite(want).abs().max().item() if want.numel() else 0.0
    worst = difference.max().item() if difference.numel() else 0.0
    if not worst > share * scale:
        raise AssertionError(f"these should differ: {_describe(difference, got, want)}, which is within {share:g} of {scale:.3g}")


def seeded(*shape, seed, dtype=torch.float64):
    """Normal random numbers (integers from -9 to 9 for an integer dtype), the same on every rank and in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-9, 10, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


def every_way(n):
    """Each grid of n ranks with exchange, and with rotate where keys travel: keyword arguments of sequence_attention."""
    grids = AttentionGrid.all_of(n)
    ways = [{"grid": grid, "transport": "exchange"} for grid in grids]
    return ways + [{"grid": grid, "transport": "rotate"} for grid in grids if grid.ring > 1]


def _compare(got, want, tol):
    """Differences as float64, inf where only one of the two is finite or either is nan; and the scale for the tolerance."""
    got, want = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    if got.is_floating_point() or got.is_complex():
        default, floor = TOLERANCES.get(got.dtype, (None, 1e-2))
    else:
        default, floor = 0.0, 1.0
    if tol is None and default is None:
        raise ValueError(f"close() has no tolerance of its own for {got.dtype}: give tol, a small multiple of what the undivided "
                         "computation errs")
    wide = torch.complex128 if got.is_complex() or want.is_complex() else torch.float64
    got, want = got.cpu().to(wide), want.cpu().to(wide)
    difference = (got - want).abs()
    difference = torch.where(got == want, 0.0, torch.where(difference.isnan(), torch.inf, difference))     # inf - inf is nan
    scale = max(_finite(want).abs().max().item() if want.numel() else 0.0, floor)
    return difference, scale, default if tol is None else tol, got, want


def _finite(x):
    return torch.where(x.isfinite(), x, 0.0)


def _describe(difference, got, want):
    if not difference.numel():
        return "both are empty"
    flat = difference.argmax().item()
    index = tuple(i.item() for i in torch.unravel_index(torch.tensor(flat), difference.shape))
    worst = f"largest difference {difference.max().item():.3g} at {index}: got {got[index].item()}, wanted {want[index].item()}"
    return f"{worst}; {difference.count_nonzero().item()} of {difference.numel()} differ"
