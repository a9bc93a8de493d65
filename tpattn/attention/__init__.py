"""Sequence attention: the one loop that follows a schedule, and the attention modules that are built on it."""

from tpattn.attention.dot_product import DistributedDotProductAttn
from tpattn.attention.engine import sequence_attention

__all__ = ["DistributedDotProductAttn", "sequence_attention"]
