"""Which heads each tp rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tpattn.errors import Unsupported
from tpattn.layout import chunk_sizes
from tpattn.params import row_spans


@dataclass(frozen=True)
class HeadShares:
    """Which of H query heads and K key-value heads each of tp ranks holds.

    Where torch.chunk's rule gives every rank the query heads of its key-value heads, it divides both. Else tp becomes
    parts x tp / parts with parts = gcd(K, tp): heads divide over the parts, and the part's query heads over its ranks; so do its
    key-value heads if that keeps every query head with the head it reads, and else the ranks of the part share them.
    """

    H: int
    K: int
    tp: int

    @property
    def parts(self) -> int:
        """Into how many parts tp divides first; tp where that is all."""
        return self.tp if self._together(self.tp) and chunk_sizes(self.K, self.tp)[-1] else math.gcd(self.K, self.tp)

    @property
    def shared(self) -> bool:
        """Whether the ranks of a part share its key-value heads."""
        return not self._together(self.parts)

    def _together(self, parts: int) -> bool:
        """Whether dividing both kinds of heads alike keeps every query head with the head it reads."""
        ratio = self.H // self.K
        return row_spans(self.H, self.tp, parts) == tuple((ratio * a, ratio * b) for a, b in row_spans(self.K, self.tp, parts))

    @property
    def queries(self) -> tuple[tuple[int, int], ...]:
        """First and last + 1 of the query heads of each rank."""
        return row_spans(self.H, self.tp, self.parts)

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """First and last + 1 of the key-value heads whose weights each rank holds."""
        return row_spans(self.K, self.tp, self.parts, self.shared)

    def split(self, queries: bool) -> dict[str, Any]:
        """How a parameter [heads, ..] divides, as arguments of `add_parameter`."""
        if queries or not self.shared:
            return {"dim": 0, "parts": self.parts}
        if self.parts == 1:
            return {"dim": None, "partial": True}
        return {"dim": 0, "parts": self.parts, "shared": True, "partial": True}

    def needed(self, rank: int) -> slice:
        """Those of the rank's key-value heads that its query heads read, counted from its first."""
        (first, last), ratio = self.queries[rank], self.H // self.K
        start = self.keys[rank][0]
        return slice(first // ratio - start, (last - 1) // ratio + 1 - start)

    def reads(self, rank: int) -> list[int] | None:
        """For each query head of the rank the head of `needed` that it reads; None when these are the usual equal groups."""
        (first, last), ratio = self.queries[rank], self.H // self.K
        found = [head // ratio - first // ratio for head in range(first, last)]
        count = found[-1] + 1
        usual = len(found) % count == 0 and found == [i // (len(found) // count) for i in range(len(found))]
        return None if usual else found

    def check(self, layer: str) -> None:
        """Raise Unsupported when a rank would hold no query head."""
        sizes = [b - a for a, b in self.queries]
        if min(sizes) == 0:
            fits = [n for n in range(1, self.H + 1) if min(b - a for a, b in HeadShares(self.H, self.K, n).queries)]
            raise Unsupported(
                f"{layer}: {self.H} query heads and {self.K} key-value heads over tp={self.tp} give {sizes} query heads: a rank "
                f"would hold none; tp could be {', '.join(map(str, fits[:12]))}"
            )
