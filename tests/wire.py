"""What torch's process groups receive, counted at their own methods: nothing of tpattn takes part, so it can prove a ledger."""

from contextlib import contextmanager

import pytest
import torch.distributed as dist

# method -> bytes that this rank receives by a call with these arguments
COUNTED = {
    "all_to_all_single": lambda group, out, *_: _bytes(out),
    "recv": lambda group, tensors, *_: sum(map(_bytes, tensors)),
    "send": lambda group, tensors, *_: 0,
    "allgather": lambda group, outs, ins, *_: sum(map(_bytes, outs[0])) - _bytes(ins[0]),
    "allreduce": lambda group, tensors, *_: sum(2 * (group.size() - 1) * _bytes(x) // group.size() for x in tensors),
}
OTHERS = """_allgather_base _reduce_scatter_base all_gather_single all_gather_single_coalesced allgather_coalesced alltoall
    allgather_into_tensor_coalesced allreduce_coalesced alltoall_base barrier broadcast gather recv_anysource reduce
    reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter""".split()


@contextmanager
def wire():
    """A list of (method, bytes received) of every message of this process inside the block; one it cannot count is an error.

    An all-to-all counts its whole receive buffer: tpattn sends no rank its own pieces. An all-reduce counts 2 (N - 1)/N of the
    tensor, what a rank must at least receive.
    """
    seen = []

    def counting(name, method, received):
        def call(group, *args, **options):
            seen.append((name, received(group, *args)))
            return method(group, *args, **options)

        return call

    def refusing(name):
        def call(group, *args, **options):
            raise AssertionError(f"a message went through {name}, which nobody counts")

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in {*COUNTED, *OTHERS} & set(dir(dist.ProcessGroup)):
            method = getattr(dist.ProcessGroup, name)
            patch.setattr(dist.ProcessGroup, name, counting(name, method, COUNTED[name]) if name in COUNTED else refusing(name))
        yield seen


def _bytes(x):
    return x.numel() * x.element_size()
