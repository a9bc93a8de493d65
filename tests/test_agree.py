"""How ranks agree before they start: one text, one outcome, one value."""

import pytest
from pool import ranks

from tpattn import ParallelContext, Unsupported
from tpattn.data import DataError
from tpattn.training import check_same, from_rank0, together


@ranks(1, 3)
@pytest.mark.parametrize("text", ["", "runs/a", "ü" * 300, "a\udcff b\n"])
def test_every_rank_gets_rank_0s_text(rank, world, text):
    """Any length, and what a file name of any bytes looks like."""
    with ParallelContext.from_env(timeout=60) as ctx:
        assert from_rank0(text if rank == 0 else "other" * (rank + 2), ctx) == text


@ranks(3)
def test_a_value_that_differs_is_an_error_on_every_rank_that_says_who_holds_what(rank, world):
    with ParallelContext.from_env(timeout=60) as ctx:
        check_same("the text", "abc", ctx)
        with pytest.raises(Unsupported, match="^the text is not the same on all ranks: abc on ranks 0, 2; def on rank 1$"):
            check_same("the text", "def" if rank == 1 else "abc", ctx)


@ranks(1, 3)
def test_a_mistake_on_some_ranks_is_a_mistake_on_all(rank, world):
    """The same one on all ranks keeps its type and text; one rank's is told with its number; other errors pass at once."""

    def wrong(text):
        raise DataError(text)

    with ParallelContext.from_env(timeout=60) as ctx:
        assert together(lambda: rank, ctx) == rank
        with pytest.raises(DataError, match="^no such file$"):
            together(lambda: wrong("no such file"), ctx)
        if world > 1:
            with pytest.raises(Unsupported, match="^rank 1: no such file$"):
                together(lambda: wrong("no such file") if rank == 1 else 5, ctx)
            with pytest.raises(Unsupported, match="^rank 0: file 0$"):
                together(lambda: wrong(f"file {rank}"), ctx)
        with pytest.raises(ZeroDivisionError):
            together(lambda: 1 / 0, ctx)
