"""`close`, `far` and `seeded` fail and pass where they should: every other test stands on them."""

import pytest
import torch
from helpers import close, far, seeded

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_close_is_relative_to_the_largest_value_wanted(dtype, error):
    want = torch.tensor([[1000.0, 0.001], [1.0, -2.0]], dtype=dtype)
    close(want + 500 * error, want)
    with pytest.raises(AssertionError, match=r"at \(1, 0\)"):
        wrong = want.clone()
        wrong[1, 0] += 2000 * error
        close(wrong, want)


def test_close_compares_float32_with_a_float64_oracle():
    want = seeded(7, 5, seed=1)
    close(want.float(), want)
    with pytest.raises(AssertionError):
        close(want.float(), want, tol=1e-9)


def test_close_keeps_a_floor_where_everything_cancelled():
    close(torch.tensor([1e-17], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64))
    close(torch.tensor([1e-8]), torch.tensor([0.0]))
    with pytest.raises(AssertionError):
        close(torch.tensor([1e-6]), torch.tensor([0.0]))


@pytest.mark.parametrize("got, want", [
    ([1.0, NAN], [1.0, NAN]), ([1.0, NAN], [1.0, 2.0]), ([INF], [1.0]), ([1.0], [INF]), ([INF], [-INF]),
    ([1.0], [1.0, 1.0]), ([[1.0]], [1.0]),
])
def test_close_refuses_nan_lone_infinities_and_other_shapes(got, want):
    with pytest.raises(AssertionError):
        close(torch.tensor(got), torch.tensor(want), tol=1e9)


def test_close_accepts_equal_infinities_numbers_lists_and_empty_tensors():
    close(torch.tensor([-INF, 1.0]), torch.tensor([-INF, 1.0]))
    close(3.0, 3.0)
    close([torch.ones(2), torch.zeros(0, 3)], [torch.ones(2), torch.zeros(0, 3)])
    with pytest.raises(AssertionError):
        close([torch.ones(2)], [torch.ones(2), torch.ones(2)])


def test_close_is_exact_for_integers_and_asks_for_a_tolerance_in_low_precision():
    close(torch.tensor([1, 2]), torch.tensor([1, 2]))
    with pytest.raises(AssertionError):
        close(torch.tensor([1, 2]), torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="give tol"):
        close(torch.ones(2, dtype=torch.bfloat16), torch.ones(2))
    close(torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 1.001), tol=1e-2)


def test_far_fails_for_what_is_close():
    want = seeded(4, 3, seed=2)
    far(2 * want, want)
    far(torch.zeros(0 + 2), torch.full((2,), NAN))
    with pytest.raises(AssertionError, match="should differ"):
        far(want + 1e-9, want)
    with pytest.raises(AssertionError, match="should differ"):
        far(torch.zeros(3), torch.zeros(3))
    with pytest.raises(AssertionError, match="shape"):
        far(torch.zeros(3), torch.zeros(4))


def test_seeded_repeats_itself_in_every_dtype():
    assert torch.equal(seeded(3, 5, seed=7), seeded(3, 5, seed=7))
    assert not torch.equal(seeded(3, 5, seed=7), seeded(3, 5, seed=8))
    assert torch.equal(seeded(3, 5, seed=7, dtype=torch.float32), seeded(3, 5, seed=7).float())
    assert seeded(2, seed=0, dtype=torch.complex64).dtype == torch.complex64
    assert seeded(20, seed=0, dtype=torch.int32).abs().max() <= 9
