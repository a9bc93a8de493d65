"""Counter-based random numbers: a value depends on (seed, name, global index) alone, never on the mesh or on what ran before.

Integers are mixed in int64, which wraps in torch; a right shift must be made logical by masking the copied sign bits.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, as a signed number
_MIX_A = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_B = -7723592293110705685  # 0x94D049BB133111EB


def _signed(x: int) -> int:
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >= 1 << 63 else x


def _logical_shift(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def fold(key: int, *words: int | str) -> int:
    """A new 64-bit key from `key` and names or numbers; another word gives an unrelated key."""
    text = "/".join([str(key), *(f"{type(w).__name__}:{w}" for w in words)])
    return _signed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def bits(key: int, index: Tensor) -> Tensor:
    """64 random bits for each `index` (int64, any shape) under `key`.

    source      splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014
    """
    z = index * _GOLDEN + key
    z = (z ^ _logical_shift(z, 30)) * _MIX_A
    z = (z ^ _logical_shift(z, 27)) * _MIX_B
    return z ^ _logical_shift(z, 31)


def uniform(key: int, index: Tensor) -> Tensor:
    """Numbers in [0, 1) for each `index`, float64, multiples of 2**-53."""
    return _logical_shift(bits(key, index), 11).to(torch.float64) * 2.0**-53


def normal(key: int, index: Tensor) -> Tensor:
    """Standard normal numbers for each `index`, float64 (Box and Muller, 1958)."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(fold(key, "radius"), index)))
    return radius * torch.cos(2.0 * math.pi * uniform(fold(key, "angle"), index))


@dataclass(frozen=True)
class RandomKey:
    """Where the random numbers of one forward come from; handed down through `forward(..., key=key)`.

    seed            of the run
    step            of the training loop, so that each step draws anew
    first_sequence  global index of this rank's first sequence in the batch: dp ranks draw for other sequences
    name            the modules on the way down, folded in one by one
    first_head      global index of this rank's first head, where heads are divided over tp
    """

    seed: int
    step: int = 0
    first_sequence: int = 0
    name: str = ""
    first_head: int = 0

    def child(self, name: str) -> RandomKey:
        """The key of the sub-module `name`."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    def number(self) -> int:
        """The key as 64 bits, without the sequence: that is part of an element's index."""
        return fold(self.seed, self.step, self.name)


def dropout(x: Tensor, p: float, key: RandomKey | None, *, positions: Tensor, channels: Tensor | None = None) -> Tensor:
    """x [B, t, C] with each element zeroed with probability p and the rest divided by 1 - p; the same on every mesh.

    positions   [t] global positions of the rows
    channels    [C] global channel of each column; None = 0..C-1 (nothing is divided)
    key         an element's fate depends on (key, global sequence, position, channel) alone
    raises      ValueError when p is not in [0, 1), or no key is given while p > 0
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout p={p} must lie in [0, 1)")
    if p == 0.0:
        return x
    if key is None:
        raise ValueError(
            f"dropout p={p} needs key=RandomKey(seed, step, first_sequence): without one, ranks would draw differently"
        )
    device = x.device
    sequence = torch.arange(x.shape[0], device=device) + key.first_sequence
    channels = torch.arange(x.shape[-1], device=device) if channels is None else channels.to(device)
    row = bits(key.number(), sequence)[:, None] ^ bits(fold(key.number(), "position"), positions.to(device))[None]
    keep = uniform(fold(key.number(), "channel"), row[..., None] + channels) >= p
    return torch.where(keep, x / (1.0 - p), torch.zeros((), dtype=x.dtype, device=device))
