"""Linear layers divided over tp, and the functions they are made of."""

from tpattn.linear.functions import column_linear, column_product, enter, leave, row_linear, row_product, split_tensor
from tpattn.linear.heads import HeadShares
from tpattn.linear.layers import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    agreed_sizes,
    check_counts,
    head_dims,
)

__all__ = [
    "ColumnParallelLinear",
    "HeadShares",
    "QKVParallelLinear",
    "RowParallelLinear",
    "agreed_sizes",
    "check_counts",
    "column_linear",
    "column_product",
    "enter",
    "head_dims",
    "leave",
    "row_linear",
    "row_product",
    "split_tensor",
]
