"""Rotary embedding: the textbook rotation at global positions, so a token's angle does not depend on where it lies."""

import pytest
import torch
from helpers import close, far, seeded

from tpattn import SequenceLayout
from tpattn.rope import rotary_angles, rotate


def turn(x, positions, base=10000.0):
    return rotate(x, *rotary_angles(positions, x.shape[-1], base, x.dtype))


@pytest.mark.parametrize("D", [2, 4, 6, 64])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_rotation_is_a_product_of_complex_numbers(D, base):
    """Element d and d + D/2 are the two parts of a number that is turned by position * base ** (-2 d / D)."""
    x = seeded(2, 7, 3, D, seed=0)
    positions = torch.tensor([0, 1, 5, 2, 1000, 77, 3])
    angle = positions[:, None].double() * base ** (-2.0 * torch.arange(D // 2).double() / D)
    want = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    close(turn(x, positions, base), torch.cat((want.real, want.imag), -1))


def test_scores_depend_on_the_distance_alone():
    q, k = seeded(1, 1, 1, 16, seed=1), seeded(1, 1, 1, 16, seed=2)

    def score(i, j):
        return (turn(q, torch.tensor([i])) * turn(k, torch.tensor([j]))).sum()

    close(score(3, 0), score(1003, 1000))
    close(score(0, 9), score(500, 509))
    far(score(3, 0), score(4, 0))


def test_position_zero_turns_nothing_and_lengths_stay():
    x = seeded(2, 5, 2, 8, seed=3)
    assert torch.equal(turn(x[:, :1], torch.tensor([0])), x[:, :1])
    close(turn(x, torch.arange(5)).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_share_is_turned_as_its_part_of_the_whole(kind, n):
    """C28: angles come from global positions; counted from zero on each rank they are far off."""
    T = 13
    x, layout = seeded(3, T, 2, 8, seed=4), getattr(SequenceLayout, kind)(T, n)
    whole = turn(x, torch.arange(T))
    for r in range(n):
        p = layout.positions(r)
        assert torch.equal(turn(x[:, p], p), whole[:, p])
        if r:
            far(turn(x[:, p], torch.arange(p.numel())), whole[:, p])


def test_angles_keep_their_digits_at_large_positions():
    """At position 1e6 float32 angles are right to 1e-7 of the circle; computed in float32 they would not be."""
    positions = torch.tensor([1_000_003])
    want = torch.remainder(positions.double()[:, None] * 10000.0 ** (-torch.arange(0, 128, 2).double() / 128), 2 * torch.pi)
    cos, sin = rotary_angles(positions, 128)
    assert cos.dtype == torch.float32
    close(cos, want.cos(), 1e-6)
    close(sin, want.sin(), 1e-6)
    careless = positions.float()[:, None] * 10000.0 ** (-torch.arange(0, 128, 2).float() / 128)
    far(careless.cos(), want.cos())
    for dtype in (torch.bfloat16, torch.float16):
        close(rotary_angles(positions, 128, dtype=dtype)[0], want.cos(), 4e-3)


def test_gradient_turns_back():
    x, g, positions = seeded(1, 4, 1, 6, seed=5).requires_grad_(), seeded(1, 4, 1, 6, seed=6), torch.tensor([3, 9, 0, 4])
    turn(x, positions).backward(g)
    close(x.grad, turn(g, -positions))
