"""A B^T, A B and A^T B over ranks equal torch.matmul on the whole in float64, forward and both gradients, whatever the offset."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import close, far, seeded
from pool import ranks

from tpattn import ParallelContext, Unsupported, comm, ledger, products
from tpattn.products import (
    FullMultiplication,
    LeftTransposeMultiplication,
    RightTransposeMultiplication,
    distributed_matmul_all,
    distributed_matmul_nt,
    distributed_matmul_tn,
)

KINDS = ["nt", "all", "tn"]
CLASSES = {"nt": RightTransposeMultiplication, "all": FullMultiplication, "tn": LeftTransposeMultiplication}
FUNCTIONS = {"nt": distributed_matmul_nt, "all": distributed_matmul_all, "tn": distributed_matmul_tn}
AGREED = 8 * 8      # bytes of what a rank tells each other one about its sizes before the first row


def torch_product(kind, left, right):
    return {"nt": lambda: left @ right.mT, "all": lambda: left @ right, "tn": lambda: left.mT @ right}[kind]()


class Problem:
    """One product of whole tensors, the same on every rank, and how its rows are divided.

    t, s        rows of left, and of right (nt, all), on each rank; for tn both have t rows and s is the division of the result
    """

    def __init__(self, kind, t, s=None, lead=(), right_lead=None, dtype=torch.float64, seed=0, D=5, S=None):
        self.kind, self.t = kind, t
        self.s = t if s is None else s
        T, S = sum(t), sum(self.s) if S is None else S
        right_lead = lead if right_lead is None else right_lead
        self.left = seeded(*lead, T, D if kind == "nt" else S, seed=seed, dtype=dtype)
        self.right = seeded(*right_lead, *{"nt": (S, D), "all": (S, D + 2), "tn": (T, D + 2)}[kind], seed=seed + 1, dtype=dtype)
        out = torch_product(kind, self.left, self.right)
        self.g = seeded(*out.shape, seed=seed + 2, dtype=dtype)     # rows differ, so ranks get different upstream gradients

    def want(self):
        """Output and both gradients of one process."""
        left, right = self.left.clone().requires_grad_(), self.right.clone().requires_grad_()
        out = torch_product(self.kind, left, right)
        return out, *torch.autograd.grad(out, (left, right), self.g)

    @property
    def divisions(self):
        """How the rows of output, left and right are divided."""
        return {"nt": (self.t, self.t, self.s), "all": (self.t, self.t, self.s), "tn": (self.s, self.t, self.t)}[self.kind]

    def share(self, rank):
        """Left, right and upstream gradient of one rank."""
        whole = zip((self.g, self.left, self.right), self.divisions, strict=True)
        g, left, right = (x.split(sizes, dim=-2)[rank].clone() for x, sizes in whole)
        return left.requires_grad_(), right.requires_grad_(), g

    def check(self, rank, got, tol=None):
        """Assert that a rank's output and gradients are its rows of what one process gets."""
        for mine, whole, sizes in zip(got, self.want(), self.divisions, strict=True):
            close(mine, whole.split(sizes, dim=-2)[rank], tol)

    def run(self, rank, offset=32, group=None):
        """Output and both gradients by the distributed product."""
        left, right, g = self.share(rank)
        out = CLASSES[self.kind].apply(left, right, offset, group)
        return out, *torch.autograd.grad(out, (left, right), g)


# ---- the same numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.sample(90)
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [1, 2, 3, 32, 1000])
@pytest.mark.parametrize("rows", ["even", "uneven", "empty"])
def test_products_equal_one_process(rank, world, kind, offset, rows):
    """C24, C32: any lengths (0 rows on a rank too), any offset, batch 3, another upstream gradient on each rank."""
    t = {"even": [7] * 4, "uneven": [5, 1, 8, 3], "empty": [0, 6, 1, 0]}[rows][:world]
    problem = Problem(kind, t, lead=(3,))
    problem.check(rank, problem.run(rank, offset))


@ranks(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_ten_and_seven_tokens(rank, world, kind, batch):
    """C24, C32: T=10 and T=7 over any number of ranks."""
    for T in (10, 7):
        t = [T // world + (r < T % world) for r in range(world)]
        problem = Problem(kind, t, lead=(batch,))
        problem.check(rank, problem.run(rank, offset=2))


@ranks(2, 3)
@pytest.mark.parametrize("kind", ["nt", "all"])
def test_rows_of_left_and_right_differ(rank, world, kind):
    """Left may have other rows than right: cross attention."""
    problem = Problem(kind, [2, 9, 1][:world], [6, 0, 4][:world], lead=(2,))
    problem.check(rank, problem.run(rank, offset=4))


@ranks(1, 2, 3)
@pytest.mark.parametrize("S", [3, 7, 1])
def test_tn_divides_other_columns_evenly(rank, world, S):
    """A^T B of another width than the number of rows, a weight gradient for example: S is cut as tensor_split cuts."""
    s = [len(piece) for piece in torch.arange(S).tensor_split(world)]
    problem = Problem("tn", [4, 6, 3][:world], s)
    problem.check(rank, problem.run(rank))


@ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead, right_lead", [
    ((), ()), ((1,), (1,)), ((2, 3), (2, 3)), ((2, 1, 2), (2, 1, 2)), ((2, 3), ()), ((), (2, 3)),
    ((2, 1), (1, 3)), ((4, 1), (2,)), ((0,), (0,)),
])
def test_leading_dimensions(rank, world, kind, lead, right_lead):
    """Any number of them, broadcast as torch.matmul does; gradients are summed where an input was broadcast."""
    problem = Problem(kind, [4, 2, 5][:world], lead=lead, right_lead=right_lead)
    problem.check(rank, problem.run(rank, offset=2))


@ranks(1, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "int32", "int64"])
def test_integers_are_exact(rank, world, kind, name):
    """Forward only, modulo the dtype's range as torch.matmul."""
    problem = Problem(kind, [4, 2, 5][:world], lead=(2,), dtype=getattr(torch, name))
    left, right = (x.split(rows, -2)[rank] for x, rows in zip((problem.left, problem.right), problem.divisions[1:], strict=True))
    got = FUNCTIONS[kind](left, right)
    want = torch_product(kind, problem.left, problem.right).split(problem.divisions[0], dim=-2)[rank]
    assert got.dtype == want.dtype and torch.equal(got, want)


@ranks(1, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["float32", "complex64", "complex128"])
def test_wide_dtypes(rank, world, kind, name):
    problem = Problem(kind, [4, 2, 5][:world], lead=(2,), dtype=getattr(torch, name))
    got = problem.run(rank, offset=3)
    assert all(x.dtype == getattr(torch, name) for x in got)
    problem.check(rank, got)


@ranks(1, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn"])
def test_low_precision_errs_at_most_twice_as_much_as_one_process(rank, world, kind, name):
    """Sums over ranks are made in float32 and rounded once."""
    dtype = getattr(torch, name)
    low = Problem(kind, [40, 17, 31, 25][:world], dtype=dtype, D=64)
    exact = Problem(kind, low.t, D=64)
    exact.left, exact.right, exact.g = (x.double() for x in (low.left, low.right, low.g))
    for got, serial, right, sizes in zip(low.run(rank, offset=8), low.want(), exact.want(), low.divisions, strict=True):
        assert got.dtype == dtype
        error = (got.double() - right.split(sizes, dim=-2)[rank]).norm()
        allowed = 2 * (serial.double() - right).split(sizes, dim=-2)[rank].norm()
        assert error <= allowed, f"{error:.3g}, one process errs {allowed / 2:.3g}"


# ---- memory layouts --------------------------------------------------------------------------------------------------------


def _every_other(x):
    return torch.stack([x, torch.full_like(x, 1e30)], dim=-1).flatten(-2)[..., ::2]


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other column": _every_other,
    "every other row": lambda x: _every_other(x.mT).mT,
    "heads inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[..., :1, :1].expand(x.shape),
    "one row expanded": lambda x: x[..., :1, :].expand(x.shape),
    "a batch element expanded": lambda x: x[:1].expand(x.shape),
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_and_gradients(rank, world, kind, layout):
    """C06: transposed, strided and expanded inputs and upstream gradients equal contiguous ones, and none is written to."""
    left, right, g = (x.detach() for x in Problem(kind, [4, 6, 3][:world], lead=(2,)).share(rank))

    def run(*tensors):
        left, right, g = tensors
        left, right = left.requires_grad_(), right.requires_grad_()
        out = CLASSES[kind].apply(left, right, 4)
        return out.detach(), *torch.autograd.grad(out, (left, right), g)

    strided = [LAYOUTS[layout](x) for x in (left, right, g)]
    before = [x.clone() for x in strided]
    close(run(*strided), run(*(x.contiguous() for x in before)))
    assert all(torch.equal(x, y) for x, y in zip(strided, before, strict=True))


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_conjugate_views(rank, world, kind):
    """A lazily conjugated tensor is sent with its values."""
    problem = Problem(kind, [4, 3], dtype=torch.complex128)
    left, right, _ = (x.detach() for x in problem.share(rank))
    want = FUNCTIONS[kind](left.conj().resolve_conj(), right.conj().resolve_conj())
    close(FUNCTIONS[kind](left.conj(), right.conj()), want)
    far(FUNCTIONS[kind](left, right), want)


@ranks(3)
@pytest.mark.parametrize("kind", KINDS)
def test_old_content_of_buffers_leaves_no_trace(rank, world, kind):
    """C24: every buffer starts as 1e30 (bytes as 0x7f), in the middle of which lengths that do not divide end."""
    empty = torch.empty

    def poisoned(*shape, **options):
        x = empty(*shape, **options)
        return x.fill_(1e30 if x.is_floating_point() else 0x7F)

    problem = Problem(kind, [5, 0, 8], lead=(2,))
    with mock.patch("torch.empty", poisoned):
        got = problem.run(rank, offset=3)
    problem.check(rank, got)


# ---- gradients -------------------------------------------------------------------------------------------------------------


@ranks(1, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["default", "positional", "keyword", "group positional", "function"])
def test_gradcheck(rank, world, kind, call):
    """C12: every way to pass the optional arguments has a backward that torch.autograd.gradcheck accepts, on (1, 1, 4, 2) too."""
    group = comm.group_of()
    rows = [3, 1][:world] if world > 1 else [4]

    def product(left, right):
        """From whole tensors, the same on every rank, to the whole result: what gradcheck can compare."""
        left, right = (comm.shard(x, group, x.dim() - 2, rows) for x in (left, right))
        apply = CLASSES[kind].apply
        out = {
            "default": lambda: apply(left, right),
            "positional": lambda: apply(left, right, 3),
            "keyword": lambda: apply(left, right, offset=1, group=None),
            "group positional": lambda: apply(left, right, 2, group.group),
            "function": lambda: FUNCTIONS[kind](left, right, group=group.group),
        }[call]()
        return comm.gather(out, group, out.dim() - 2)

    for lead in ((), (1, 1)):
        left = seeded(*lead, 4, 2 if kind == "nt" else 4, seed=1).requires_grad_()
        right = seeded(*lead, 4, 2, seed=2).requires_grad_()
        assert torch.autograd.gradcheck(product, (left, right))


@ranks(2)
@pytest.mark.parametrize("needs", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_gradient_that_is_asked_for(rank, world, kind, needs):
    """C10: one frozen input; nothing is sent for its gradient."""
    problem = Problem(kind, [4, 3])
    left, right, g = problem.share(rank)
    frozen, other = (right, left) if needs == "left" else (left, right)
    frozen.requires_grad_(False)
    out = FUNCTIONS[kind](left, right)
    assert out.requires_grad
    with ledger() as book:
        out.backward(g)
    i = 1 if needs == "left" else 2
    close(other.grad, problem.want()[i].split(problem.divisions[i], dim=-2)[rank])
    assert frozen.grad is None
    assert len(book.messages) == 1


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_need_different_gradients(rank, world, kind):
    """Left needs one on rank 0, right on rank 1: both take part in both backward messages, and neither waits for ever."""
    problem = Problem(kind, [4, 3])
    left, right, g = problem.share(rank)
    (right if rank == 0 else left).requires_grad_(False)
    FUNCTIONS[kind](left, right).backward(g)
    mine, i = (left, 1) if rank == 0 else (right, 2)
    close(mine.grad, problem.want()[i].split(problem.divisions[i], dim=-2)[rank])
    assert (right if rank == 0 else left).grad is None


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_any_gradient_is_refused(rank, world, kind):
    """The backward of the other rank would wait for its messages."""
    left, right, _ = Problem(kind, [4, 3]).share(rank)
    if rank == 1:
        left, right = left.detach(), right.detach()
    with pytest.raises(Unsupported, match=r"none does on ranks \[1\].*alike on all ranks"):
        FUNCTIONS[kind](left, right)
    with torch.no_grad():
        assert not FUNCTIONS[kind](left, right).requires_grad


@ranks(2)
def test_tn_gradient_of_the_original_is_far(rank, world):
    """The package this replaces took dA = dC B^T for C = A^T B; right is B dC^T. They have the same shape when S = T."""
    problem = Problem("tn", [4, 3])
    left, right, g = problem.share(rank)
    out, d_left, _ = problem.run(rank)
    close(d_left, problem.want()[1].split(problem.t, dim=-2)[rank])
    far(distributed_matmul_nt(g, right), d_left)


@ranks(3)
def test_a_gradient_that_is_not_summed_over_ranks_is_far(rank, world):
    """dB of nt and all is a sum over ranks; the own part alone is not it."""
    for kind in ("nt", "all"):
        problem = Problem(kind, [4, 3, 2])
        left, right, g = problem.share(rank)
        span = slice(sum(problem.t[:rank]), sum(problem.t[: rank + 1]))
        own_part = g[:, span].mT @ left if kind == "nt" else left[:, span].mT @ g
        far(own_part, problem.run(rank)[2])


@ranks(1, 2, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead, right_lead", [((), ()), ((3,), ()), ((), (2,))])
def test_second_derivatives_equal_one_process(rank, world, kind, lead, right_lead):
    """A penalty on both gradients, differentiated by both inputs and by the upstream gradient."""
    problem = Problem(kind, [4, 2, 3][:world], lead=lead, right_lead=right_lead)
    whole = [x.clone().requires_grad_() for x in (problem.left, problem.right, problem.g)]
    mine = [x.requires_grad_() for x in problem.share(rank)]

    def penalty(product, left, right, g):
        gradients = torch.autograd.grad(product(left, right), (left, right), g, create_graph=True)
        return sum((d**3).sum() for d in gradients)

    want = torch.autograd.grad(penalty(lambda a, b: torch_product(kind, a, b), *whole), whole)
    got = torch.autograd.grad(penalty(lambda a, b: FUNCTIONS[kind](a, b), *mine), mine)
    rows = [problem.divisions[i] for i in (1, 2, 0)]
    close(got, [x.split(sizes, dim=-2)[rank] for x, sizes in zip(want, rows, strict=True)])


# ---- groups ----------------------------------------------------------------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_sub_groups_of_a_mesh(rank, world, kind):
    """C47, C48: two products at once, each in its own group with its own data, on {0,2} and {1,3}, then on {0,1} and {2,3}."""
    for sizes, axis_name in (({"cp": 2, "tp": 2}, "cp"), ({"dp": 2, "cp": 2}, "cp"), ({"cp": 2, "tp": 2}, "tp")):
        with ParallelContext.from_env(**{"dp": 1, **sizes}) as ctx:
            axis = getattr(ctx, axis_name)
            problem = Problem(kind, [5, 2], lead=(3,), seed=10 * min(axis.ranks))
            problem.check(axis.rank, problem.run(axis.rank, offset=2, group=axis.group))


@ranks(4)
def test_another_order_of_ranks(rank, world):
    """C48: a group that holds two of four ranks and not the first; the others are refused by name."""
    group = dist.new_group([1, 3])
    try:
        if rank in (1, 3):
            problem = Problem("all", [3, 4])
            problem.check(rank // 2, problem.run(rank // 2, group=group))
        else:
            left, right, _ = Problem("all", [3, 4]).share(0)
            with pytest.raises(Unsupported, match=f"rank {rank} is not a member"):
                distributed_matmul_all(left, right, group=group)
    finally:
        if rank in (1, 3):
            dist.destroy_process_group(group)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_process_group(kind):
    """One process: an ordinary product, nothing initialised."""
    problem = Problem(kind, [6], lead=(3,))
    with ledger() as book:
        problem.check(0, problem.run(0))
    assert not dist.is_initialized() and not book.messages


# ---- what travels ----------------------------------------------------------------------------------------------------------


def _rows(book, direction="forward"):
    """Messages that carry rows: all but the small one by which the ranks agree, the first of forward."""
    messages = book.select(direction=direction)
    return messages[1:] if direction == "forward" else messages


@ranks(2, 3)
@pytest.mark.parametrize("offset", [1, 3, 32, 1000])
@pytest.mark.parametrize("kind", ["nt", "all"])
def test_forward_sends_the_others_rows_once_in_messages_of_offset(rank, world, kind, offset):
    t, D, B = [5, 9, 2][:world], 6, 2
    left, right, _ = Problem(kind, t, lead=(B,), D=D).share(rank)
    with ledger() as book:
        FUNCTIONS[kind](left, right, offset)
    width, others = right.shape[-1], [size for r, size in enumerate(t) if r != rank]
    assert book.messages[0].bytes == AGREED * (world - 1)
    assert sum(m.bytes for m in _rows(book)) == B * sum(others) * width * 8
    assert {m.operation for m in book.messages} == {"all_gather"}
    length = max(t) if kind == "nt" else width
    most = (world - 1) * offset * width if kind == "nt" else sum(others) * offset
    assert len(_rows(book)) == -(-length // offset)
    assert max(m.bytes for m in _rows(book)) <= B * most * 8


@ranks(2, 3)
def test_tn_sends_each_owner_its_part_once(rank, world):
    """One reduce-scatter: this rank receives its own rows of the result from each other rank, and nothing else."""
    t = [5, 9, 2][:world]
    left, right, _ = Problem("tn", t, lead=(2,)).share(rank)
    with ledger() as book:
        out = distributed_matmul_tn(left, right)
    message, = _rows(book)
    assert message.operation == "reduce_scatter" and message.bytes == (world - 1) * out.numel() * 8


@ranks(2)
def test_backward_keeps_the_offset(rank, world):
    """Gradients travel in the same small messages, and a broadcast right in its own size."""
    t, D = [5, 9], 6
    for kind in ("nt", "all"):
        left, right, g = Problem(kind, t, lead=(4,), right_lead=(1,), D=D).share(rank)
        out = FUNCTIONS[kind](left, right, offset=2)
        with ledger() as book:
            out.backward(g)
        *rows, last = _rows(book, "backward")
        width, other = right.shape[-1], t[1 - rank]
        assert last.operation == "reduce_scatter" and last.bytes == t[rank] * width * 8
        assert sum(m.bytes for m in rows) == other * width * 8
        assert len(rows) == (-(-width // 2) if kind == "nt" else -(-max(t) // 2))


@ranks(2)
@pytest.mark.parametrize("kind", ["nt", "all"])
def test_at_most_two_messages_are_on_their_way(rank, world, kind):
    start_gather, travelling, most = comm.start_gather, [], []

    def counted(*args, **options):
        wait = start_gather(*args, **options)
        travelling.append(wait)
        most.append(len(travelling))

        def arrived():
            travelling.remove(wait)
            return wait()

        return arrived

    problem = Problem(kind, [9, 14])
    with mock.patch.object(products.comm, "start_gather", counted):
        problem.check(rank, problem.run(rank, offset=1))
    assert max(most) == 2 and not travelling


@ranks(2)
@pytest.mark.parametrize("offset, widths", [
    (1, [128, 128, 44]), (32, [128, 128, 44]), (100, [200, 100]), (200, [200, 100]), (999, [300]),
])
def test_small_pieces_are_multiplied_together(rank, world, offset, widths):
    """Buffers hold `offset` rows, or the 128 for which a product is efficient; messages stay at `offset`."""
    call = products._agree("nt", torch.ones(2, 3), torch.ones(300, 3), offset, None)
    (own, first, whole), *pieces = products._pieces(torch.full((300, 3), float(rank)), -2, call)
    assert (own, first, len(whole)) == (rank, 0, 300)
    assert [len(piece) for _, _, piece in pieces] == widths
    assert [first for _, first, _ in pieces] == [sum(widths[:i]) for i in range(len(widths))]
    assert all(peer == 1 - rank and (piece == peer).all() for peer, _, piece in pieces)


@ranks(2)
def test_nothing_is_sent_when_there_is_nothing_to_send(rank, world):
    """Batch 0, or no columns: known to all ranks."""
    with ledger() as book:
        assert distributed_matmul_nt(torch.ones(2, 0), torch.ones(3, 0)).tolist() == [[0.0] * 6] * 2
        assert distributed_matmul_all(torch.ones(0, 2, 6), torch.ones(0, 3, 4)).shape == (0, 2, 4)
    assert len(book.messages) == 2


# ---- refusals --------------------------------------------------------------------------------------------------------------

A = torch.ones(2, 3)


@ranks(2)
@pytest.mark.parametrize("kind, left, right, offset, message", [
    ("nt", A, torch.ones(2, 4), 32, r"\[\*, t, D\].*\[2, 3\].*\[2, 4\]"),
    ("tn", A, torch.ones(3, 3), 32, r"\[\*, t, E\].*\[2, 3\].*\[3, 3\]"),
    ("all", A, torch.ones(2, 4), 32, r"3, 3\] columns.*2 \+ 2 = 4 rows"),
    ("nt", A[0], A, 32, r"dense tensors.*\[3\] for left"),
    ("nt", A, [[1.0]], 32, "got list for right"),
    ("nt", A.to_sparse(), A, 32, "sparse"),
    ("nt", A, A.double(), 32, r"float32.*float64.*\.to"),
    ("nt", A.bool(), A.bool(), 32, r"multiplies no such.*bool.*convert"),
    ("nt", A.expand(2, 2, 3), A.expand(3, 2, 3), 32, r"do not broadcast.*\[2, 2, 3\].*equal or 1"),
    ("nt", A, A, 0, "offset=0 must be an integer >= 1"),
    ("all", A, A, -3, "offset=-3"),
    ("tn", A, A, True, "offset=True"),
    ("nt", A, A, 2.0, r"offset=2\.0"),
    ("nt", A, A, None, "offset=None"),
])
def test_refused_before_a_row_is_sent(rank, world, kind, left, right, offset, message):
    """Value, need and remedy, on every rank; the products still work afterwards."""
    with ledger() as book, pytest.raises(Unsupported, match=message):
        CLASSES[kind].apply(left, right, offset)
    assert not _rows(book)
    assert distributed_matmul_nt(A, A).tolist() == [[3.0] * 4] * 2


@ranks(2)
@pytest.mark.parametrize("what, message", [
    ("width", "last dimension of right"), ("batch", "batch elements"), ("offset", "offset must be"), ("dtype", "dtype must be"),
])
def test_ranks_that_disagree_are_refused_everywhere(rank, world, what, message):
    """What must be the same on all ranks is compared before a row is sent."""
    x = torch.ones(2, 2, 3 + (what == "width") * rank, dtype=torch.float64 if what == "dtype" and rank else torch.float32)
    x = x[: 1 + rank] if what == "batch" else x
    with pytest.raises(Unsupported, match=f"{message}.*rank {rank} and another on ranks .{1 - rank}"):
        distributed_matmul_nt(x, x, 1 + rank if what == "offset" else 1)


@ranks(2)
def test_tn_of_other_widths_is_refused(rank, world):
    with pytest.raises(Unsupported, match=r"same number of columns on every rank, got \[3, 4\]"):
        distributed_matmul_tn(torch.ones(2, 3 + rank), A)
