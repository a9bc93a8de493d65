"""tpattn: transformer attention sharded in two ways at once, weights over `tp` and tokens over `cp`.

`build` is loaded when it is first used, since it brings Hydra.
"""

import importlib
from typing import Any

from tpattn import masks
from tpattn.attention import DistributedDotProductAttn, sequence_attention
from tpattn.attention.layers import ParallelSelfAttention
from tpattn.blocks import ParallelMLP, TransformerBlock
from tpattn.checkpoint import load_latest, save
from tpattn.comm import ledger
from tpattn.embedding import VocabParallelEmbedding
from tpattn.errors import CollectiveMismatch, CollectiveTimeout, ContextClosed, PeerLost, TpattnError, Unsupported
from tpattn.fsdp import no_sync, shard
from tpattn.gradients import clip_grad_norm_, finish_gradients
from tpattn.layout import AttentionGrid, SequenceLayout
from tpattn.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear, column_linear, row_linear, split_tensor
from tpattn.loss import linear_cross_entropy, token_mean, vocab_parallel_cross_entropy
from tpattn.mesh import ParallelContext
from tpattn.model import Transformer
from tpattn.norm import LayerNorm, RMSNorm
from tpattn.params import load_whole_state_dict, param_groups, replicated, whole_state_dict
from tpattn.products import (
    FullMultiplication,
    LeftTransposeMultiplication,
    RightTransposeMultiplication,
    distributed_matmul_all,
    distributed_matmul_nt,
    distributed_matmul_tn,
)
from tpattn.random import RandomKey, dropout

__version__ = "0.1.0"

_LAZY = {"build": "tpattn.config"}  # name -> module it is loaded from at first use


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tpattn' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


__all__ = [
    "AttentionGrid",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ColumnParallelLinear",
    "ContextClosed",
    "DistributedDotProductAttn",
    "FullMultiplication",
    "LayerNorm",
    "LeftTransposeMultiplication",
    "ParallelContext",
    "ParallelMLP",
    "ParallelSelfAttention",
    "PeerLost",
    "QKVParallelLinear",
    "RMSNorm",
    "RandomKey",
    "RightTransposeMultiplication",
    "RowParallelLinear",
    "SequenceLayout",
    "TpattnError",
    "Transformer",
    "TransformerBlock",
    "Unsupported",
    "VocabParallelEmbedding",
    "build",
    "clip_grad_norm_",
    "column_linear",
    "distributed_matmul_all",
    "distributed_matmul_nt",
    "distributed_matmul_tn",
    "dropout",
    "finish_gradients",
    "ledger",
    "linear_cross_entropy",
    "load_latest",
    "load_whole_state_dict",
    "masks",
    "no_sync",
    "param_groups",
    "replicated",
    "row_linear",
    "save",
    "sequence_attention",
    "shard",
    "split_tensor",
    "token_mean",
    "vocab_parallel_cross_entropy",
    "whole_state_dict",
]
