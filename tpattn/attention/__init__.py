"""Sequence attention: the one loop that follows a schedule, and the attention modules that are built on it."""

from tpattn.attention.engine import sequence_attention

__all__ = ["sequence_attention"]
