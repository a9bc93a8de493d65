"""How one call of local attention is computed: the back ends, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from tpattn.errors import Unsupported
from tpattn.kernels.tiles import Change, wide_dtype

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Backend:
    """How one call is computed. `mask` is None (all pairs), the word "causal", or a bool [.., T, S].

    leaf            side of the causal squares that are computed whole, forward and backward, by dtype (0 = never split)
    """

    name = "backend"
    note = ""
    device = ""  # where it computes, and in which dtypes
    dtypes: tuple[torch.dtype, ...] = _FLOATS
    tried = True  # False: never run on its device, so taken only when named

    def supports(self, device: torch.device, dtype: torch.dtype, changes: bool = False, width: int = 0) -> bool:
        """Whether this backend can compute there, with changed scores (softcap, ALiBi, dropout), heads of so many columns."""
        raise NotImplementedError

    def leaf(self, dtype: torch.dtype, backward: bool, rows: int) -> int:
        """Side in tokens of the causal squares that one call computes along so many rows; larger ones are split as a tree."""
        return 128

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, scale: float, change: Change | None = None
    ) -> tuple[Tensor, Tensor]:
        """out [B, H, T, Dv], in the dtype of q or wider, and lse [B, H, T]; a row without keys gives 0 and -inf."""
        raise NotImplementedError

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | str | None,
        scale: float,
        change: Change | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this call's pairs, from the gradient, output and lse of the whole row."""
        raise NotImplementedError


@lru_cache(maxsize=64)
def square(kind: str, n: int, device: torch.device) -> Tensor:
    ones = torch.ones(n, n, dtype=torch.bool, device=device)
    return ones.tril() if kind == "causal" else ones.triu()


def of_heads(mask: Tensor | str | None, heads: slice) -> Tensor | str | None:
    """The mask of these query heads."""
    return mask[:, heads] if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1 else mask


def _as_bool(mask: Tensor | str | None, T: int, S: int, device: torch.device) -> Tensor | None:
    if isinstance(mask, str):
        return square("causal", T, device) if T == S else torch.ones(T, S, dtype=torch.bool, device=device).tril()
    return mask


class Math(Backend):
    """Plain matrix products: any device, float dtype and change of scores, the reference. Sums in float32 at least."""

    name = "math"
    note = "any device; builds one block of scores at a time"
    _most_scores = 1 << 22  # elements of one block of scores

    def supports(self, device: torch.device, dtype: torch.dtype, changes: bool = False, width: int = 0) -> bool:
        return dtype in self.dtypes

    def _blocks(self, q: Tensor, k: Tensor, mask: Tensor | str | None) -> Iterator[tuple[slice, Tensor | None]]:
        T, S = q.shape[2], k.shape[2]
        allowed = _as_bool(mask, T, S, q.device)
        step = max(1, self._most_scores // max(1, q.shape[0] * q.shape[1] * S))
        for start in range(0, T, step):
            rows = slice(start, min(T, start + step))
            yield rows, None if allowed is None else allowed[..., rows, :]

    @staticmethod
    def _wide(*tensors: Tensor) -> list[Tensor]:
        return [x.to(wide_dtype(tensors[0].dtype)) for x in tensors]

    @staticmethod
    def _scores(
        q_BKGTD: Tensor, k_BKSD: Tensor, allowed: Tensor | None, scale: float, change: Change | None, rows: slice
    ) -> tuple[Tensor, Tensor | None]:
        scores, slope = torch.einsum("bkgtd,bksd->bkgts", q_BKGTD, k_BKSD) * scale, None
        if change is not None:
            scores, slope = change.scores(scores, rows)
        if allowed is not None:
            if allowed.dim() == 4:  # [b, h, T, S]: heads as their groups
                heads = allowed.shape[1]
                K, G = scores.shape[1:3]
                allowed = allowed.unflatten(1, (K, G)) if heads != 1 else allowed[:, :, None]
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores, slope

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, scale: float, change: Change | None = None
    ) -> tuple[Tensor, Tensor]:
        K = k.shape[1]
        outs, lses = [], []
        wide_k, wide_v = self._wide(k, v)
        for rows, allowed in self._blocks(q, k, mask):
            (block,) = self._wide(q[:, :, rows].unflatten(1, (K, -1)))
            scores, _ = self._scores(block, wide_k, allowed, scale, change, rows)
            lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
            if change is not None and (kept := change.kept(weights, rows)) is not None:
                weights = weights * kept
            outs.append(torch.einsum("bkgts,bksd->bkgtd", weights, wide_v).flatten(1, 2))
            lses.append(lse.flatten(1, 2))
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | str | None,
        scale: float,
        change: Change | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        K = k.shape[1]
        wide_k, wide_v = self._wide(k, v)
        dk, dv, dqs = torch.zeros_like(wide_k), torch.zeros_like(wide_v), []
        for rows, allowed in self._blocks(q, k, mask):
            bq, bg, bo, bl = self._wide(*(x[:, :, rows].unflatten(1, (K, -1)) for x in (q, g, out, lse)))
            scores, slope = self._scores(bq, wide_k, allowed, scale, change, rows)
            weights = torch.exp(scores - torch.where(bl == -torch.inf, 0.0, bl)[..., None])
            delta = (bg * bo).sum(-1, keepdim=True)
            dweights = torch.einsum("bkgtd,bksd->bkgts", bg, wide_v)
            kept = None if change is None else change.kept(weights, rows)
            dv += torch.einsum("bkgts,bkgtd->bksd", weights if kept is None else weights * kept, bg)
            dscores = weights * ((dweights if kept is None else dweights * kept) - delta) * scale
            if slope is not None:
                dscores = dscores * slope
            dk += torch.einsum("bkgts,bkgtd->bksd", dscores, bq)
            dqs.append(torch.einsum("bkgts,bksd->bkgtd", dscores, wide_k).flatten(1, 2))
        return torch.cat(dqs, dim=2), dk, dv


class Fused(Backend):
    """A fused op of torch behind the guards that all of them need; a subclass calls the op (`_op`, `_op_backward`).

    Empty tensors kill some ops, so they never get here. Masks become additive in q's dtype. Most ops want Dv = D, and a multiple
    of `multiple`: zeros are added, which change neither scores nor outputs. A last dimension that is not contiguous is copied. A
    causal flag multiplies -inf by the scale, so a scale of 0 or less goes into q. The lse that an op reports for a row without
    keys is replaced by -inf; its output there must be 0.
    """

    multiple = 1
    widest = 0  # most columns of a head; 0 = any

    def supports(self, device: torch.device, dtype: torch.dtype, changes: bool = False, width: int = 0) -> bool:
        fits = not self.widest or width <= self.widest
        return device.type == self.device and dtype in self.dtypes and fits and not changes

    def _op(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _op_backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _pad(self, width: int, *tensors: Tensor) -> list[Tensor]:
        width += -width % self.multiple
        padded = (x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in tensors)
        return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]

    @staticmethod
    def _positive(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
        """q, scale and sign: sign * q times a positive scale is what the caller's q and scale are."""
        sign = (scale > 0) - (scale < 0)
        return (q, scale, sign) if sign == 1 else (q * sign, abs(scale) or 1.0, sign)

    @staticmethod
    def _additive(mask: Tensor | str | None, dtype: torch.dtype) -> Tensor | None:
        if mask is None or isinstance(mask, str):
            return None
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, scale: float, change: Change | None = None
    ) -> tuple[Tensor, Tensor]:
        Dv = v.shape[-1]
        q, scale, _ = self._positive(q, scale)
        q, k, v = self._pad(max(q.shape[-1], Dv), q, k, v)
        out, lse = self._op(q, k, v, self._additive(mask, q.dtype), isinstance(mask, str), scale)
        out = out[..., :Dv]
        if isinstance(mask, Tensor):
            lse = lse.masked_fill(~mask.any(-1), -torch.inf)
        return out, lse

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | str | None,
        scale: float,
        change: Change | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        D, Dv = q.shape[-1], v.shape[-1]
        q, scale, sign = self._positive(q, scale)
        q, k, v, g, out = self._pad(max(D, Dv), q, k, v, g, out)
        if isinstance(mask, Tensor):
            lse = torch.where(lse == -torch.inf, 0.0, lse)  # the row has no key anywhere, so none here: exp(-inf - 0) = 0
        bias = self._additive(mask, q.dtype)
        dq, dk, dv = self._op_backward(g, q, k, v, out, lse, bias, isinstance(mask, str), scale)
        return dq[..., :D] if sign == 1 else dq[..., :D] * sign, dk[..., :D], dv[..., :Dv]


@lru_cache(maxsize=8)
def fast_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in `dtype` itself; where it does not, torch's flash op is 7 times slower than in float32."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


class CpuFlash(Fused):
    """torch's flash attention for CPU, the op behind scaled_dot_product_attention, which also hands out the lse.

    Beside the common guards (torch 2.13): a fully masked row reports lse 0.0; a last dimension that is not contiguous is read as
    if it were (numbers from other memory). In bfloat16 and float16 it rounds the output of each call, which adds up when a row is
    the sum of many small calls: those are computed in float32, at no cost in time. So is every call where the CPU has no products
    of that precision.
    """

    _few_keys = 128
    _many_rows = 256
    name = "cpu_flash"
    note = "CPU, float32, float64, bfloat16, float16"
    device = "cpu"

    def leaf(self, dtype: torch.dtype, backward: bool, rows: int) -> int:
        """The op's causal flag saves nothing up to 512 (torch 2.13), and many small squares in one call take no longer than what
        they save; few do. Whole squares where bfloat16 dislikes small calls.
        """
        if backward and dtype in (torch.bfloat16, torch.float16) and fast_on_cpu(dtype):
            return 0
        return 32 if rows >= self._many_rows else 128

    def _op(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        low = q.dtype in (torch.bfloat16, torch.float16)
        if low and (k.shape[2] <= self._few_keys or not fast_on_cpu(q.dtype)):
            q, k, v, bias = q.float(), k.float(), v.float(), None if bias is None else bias.float()
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse

    def _op_backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not fast_on_cpu(q.dtype):
            g, q, k, v, out = (x.float() for x in (g, q, k, v, out))
            bias = None if bias is None else bias.float()
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = op(g, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
        return dq, dk, dv


class CudaEfficient(Fused):
    """torch's memory-efficient attention for CUDA. It wants the lse padded to 32 rows, the bias to 16 columns, and K = H.

    A key head is expanded over its query heads as a view, one call for each, so nothing is repeated in memory.
    """

    name = "cuda_efficient"
    note = "CUDA, float32, bfloat16, float16"
    device, multiple = "cuda", 8
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    tried = False

    def leaf(self, dtype: torch.dtype, backward: bool, rows: int) -> int:
        """Whole squares: the op skips what its causal flag hides."""
        return 0

    @staticmethod
    def _aligned(bias: Tensor | None, B: int, H: int) -> Tensor | None:
        if bias is None:
            return None
        T, S = bias.shape[-2:]
        return torch.nn.functional.pad(bias, (0, -S % 16))[..., :S].expand(B, H, T, S)

    def _op(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        (B, H, T, _), K = q.shape, k.shape[1]
        outs, lses, bias = [], [], self._aligned(bias, B, H)
        for i in range(K):
            mine = slice(i * H // K, (i + 1) * H // K)
            key, value = (x[:, i : i + 1].expand(-1, H // K, -1, -1) for x in (k, v))
            some = None if bias is None else bias[:, mine]
            op = torch.ops.aten._scaled_dot_product_efficient_attention
            out, lse, *_ = op(q[:, mine], key, value, some, True, 0.0, causal, scale=scale)
            if some is not None:
                out = out.masked_fill((some.amax(-1) == -torch.inf)[..., None], 0.0)  # not known to be 0, so made so
            outs.append(out)
            lses.append(lse[..., :T])
        return (outs[0], lses[0]) if K == 1 else (torch.cat(outs, dim=1), torch.cat(lses, dim=1))

    def _op_backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (B, H, T, _), K = q.shape, k.shape[1]
        bias, no_random = self._aligned(bias, B, H), torch.zeros((), dtype=torch.int64, device=q.device)
        lse = torch.nn.functional.pad(lse, (0, -T % 32), value=torch.inf)
        parts = []
        for i in range(K):
            mine = slice(i * H // K, (i + 1) * H // K)
            key, value = (x[:, i : i + 1].expand(-1, H // K, -1, -1) for x in (k, v))
            some = None if bias is None else bias[:, mine]
            op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
            wanted = [True, True, True, False]
            dq, dk, dv, _ = op(
                *(g[:, mine], q[:, mine], key, value, some, out[:, mine], lse[:, mine].contiguous(), no_random, no_random),
                *(0.0, wanted, causal),
                scale=scale,
            )
            parts.append((dq, *(Math._wide(x)[0].sum(1, keepdim=True) for x in (dk, dv))))
        dq, dk, dv = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
        return dq, dk, dv


class CudaFlash(CudaEfficient):
    """torch's flash attention for CUDA. It takes no mask: calls with one go to the memory-efficient op."""

    name = "cuda_flash"
    note = "CUDA, bfloat16, float16, head_dim up to 256; calls with a mask run on cuda_efficient"
    dtypes, widest = (torch.bfloat16, torch.float16), 256

    def _op(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if bias is not None:
            return super()._op(q, k, v, bias, causal, scale)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def _op_backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if bias is not None:
            return super()._op_backward(g, q, k, v, out, lse, bias, causal, scale)
        no_random = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = None, None, q.shape[2], k.shape[2]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, no_random, no_random, scale=scale
        )
        return dq, dk, dv


class HeadByHead(Backend):
    """Another backend, called for one query head at a time on fresh copies, so that its bits depend on nothing else.

    The bits of a product may depend on how many heads are computed together (batched matmul), and on strides and alignment
    (torch 2.13 on CPU, where head_dim is odd); both differ between grids.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner, self.name = inner, inner.name

    def leaf(self, dtype: torch.dtype, backward: bool, rows: int) -> int:
        """That of the other backend."""
        return self.inner.leaf(dtype, backward, rows)

    @staticmethod
    def _heads(
        H: int, K: int, mask: Tensor | str | None, change: Change | None
    ) -> Iterator[tuple[slice, slice, Tensor | str | None, Change | None]]:
        """Each query head, its key head, and what the mask and the change are for it."""
        for i in range(H):
            one, kv = slice(i, i + 1), slice(i // (H // K), i // (H // K) + 1)
            yield one, kv, of_heads(mask, one), None if change is None else change.of_heads(one)

    @staticmethod
    def _copy(x: Tensor, heads: slice) -> Tensor:
        return x[:, heads].clone(memory_format=torch.contiguous_format)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, scale: float, change: Change | None = None
    ) -> tuple[Tensor, Tensor]:
        copy = self._copy
        done = [
            self.inner.forward(copy(q, one), copy(k, kv), copy(v, kv), part, scale, its)
            for one, kv, part, its in self._heads(q.shape[1], k.shape[1], mask, change)
        ]
        return torch.cat([out for out, _ in done], dim=1), torch.cat([lse for _, lse in done], dim=1)

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | str | None,
        scale: float,
        change: Change | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        copy, dqs, (dk, dv) = self._copy, [], (torch.zeros_like(x, dtype=wide_dtype(x.dtype)) for x in (k, v))
        for one, kv, part, its in self._heads(q.shape[1], k.shape[1], mask, change):
            g_one, q_one, out_one, lse_one = (copy(x, one) for x in (g, q, out, lse))
            k_one, v_one = copy(k, kv), copy(v, kv)
            dq, dk_one, dv_one = self.inner.backward(g_one, q_one, k_one, v_one, out_one, lse_one, part, scale, its)
            dqs.append(dq)
            dk[:, kv].add_(dk_one)
            dv[:, kv].add_(dv_one)
        return torch.cat(dqs, dim=1), dk, dv


_BACKENDS: tuple[Backend, ...] = (CpuFlash(), CudaFlash(), CudaEfficient(), Math())


NAMES = tuple(b.name for b in _BACKENDS)


def available(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """The backends that can compute there, best first, each with a note: where it runs, and whether it ever has.

    Those that never ran on their device are used only when they are named (`kernel="cuda_flash"`).
    """
    untried = "; never run on its device yet, so used only when named"
    able = (b for b in _BACKENDS if b.supports(torch.device(device), dtype))
    return {b.name: b.note + ("" if b.tried else untried) for b in able}


def choose(name: str, device: torch.device, dtype: torch.dtype, changes: bool = False, width: int = 0) -> Backend:
    """The backend called `name`, or with "auto" the first that ever ran and supports what is asked.

    changes     whether scores or weights are changed (softcap, ALiBi, dropout)
    width       the larger of D and Dv
    raises      Unsupported for an unknown name, or one that cannot compute that there
    """
    if dtype not in _FLOATS:
        raise Unsupported(f"attention in {dtype} is not supported; use float32, float64, bfloat16 or float16")
    able = [b for b in _BACKENDS if b.supports(device, dtype, changes, width)]
    for backend in able:
        if name == backend.name or (name == "auto" and backend.tried):
            return backend
    what = f"{dtype} on {device.type}, head_dim {width}" + (" with softcap, ALiBi or dropout" if changes else "")
    raise Unsupported(f"kernel={name!r} cannot compute {what}; there are auto, {', '.join(b.name for b in able)}")
