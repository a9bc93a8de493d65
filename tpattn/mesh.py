"""`ParallelContext`: the axes dp, cp, tp of one DeviceMesh, their groups, and who holds what.

Owns the life of process groups (made once, in the same order on all ranks, each with the context's timeout; destroyed by
`close`). Leaves every message to `comm`. Rank order: tp fastest, then cp, then dp.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpattn import comm
from tpattn.errors import TpattnError, Unsupported
from tpattn.layout import SequenceLayout

AXES = ("dp", "cp", "tp")
_starts = itertools.count()  # numbers the process groups this process has started, so that each gets its own keys in the store


class Axis(comm.Group):
    """One axis of the mesh as this rank sees it: `size`, `rank`, `ranks`, `group`, and whole <-> share along a layout.

    size        number of ranks
    rank        this rank's place on the axis
    ranks       global ranks of the axis, in order
    group       torch's process group; in `single()`, which has none, the axis itself stands for it
    """

    def shard(self, x: Tensor, layout: SequenceLayout, dim: int = 1) -> Tensor:
        """This rank's share of a whole that is the same on every rank of the axis: sends nothing; gradient: all-gather.

        x           [.., T, ..] with T at `dim`
        returns     [.., t, ..] at layout.positions(rank), in local order; a copy
        """
        self._check(x, layout, dim, layout.T, "whole")
        return comm.shard(layout.to_rank_order(x, dim), self, dim, layout.sizes)

    def gather(self, x: Tensor, layout: SequenceLayout, dim: int = 1) -> Tensor:
        """The whole from the shares: all-gather; gradient: own piece. Use it where every rank computes the same loss from it.

        x           [.., t, ..] with this rank's t tokens at `dim`
        returns     [.., T, ..] in the order of the sequence, the same on every rank
        """
        self._check(x, layout, dim, layout.sizes[self.rank], "share")
        return layout.from_rank_order(comm.gather(x, self, dim, layout.sizes), dim)

    def gather_sum(self, x: Tensor, layout: SequenceLayout, dim: int = 1) -> Tensor:
        """The whole from the shares: all-gather; gradient: reduce-scatter. Use it where the ranks' losses differ.

        x           [.., t, ..] with this rank's t tokens at `dim`
        returns     [.., T, ..] in the order of the sequence
        """
        self._check(x, layout, dim, layout.sizes[self.rank], "share")
        return layout.from_rank_order(comm.gather_sum(x, self, dim, layout.sizes), dim)

    def _check(self, x: Tensor, layout: SequenceLayout, dim: int, need: int, what: str) -> None:
        self.require_open()
        if layout.n != self.size:
            raise Unsupported(f"{layout!r} is for {layout.n} ranks but {self.name} has {self.size}; make it with n={self.size}")
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != need:
            raise Unsupported(
                f"{self.name}: the {what} of {layout!r} on rank {self.rank} has {need} tokens at dim={dim}, got {list(x.shape)}; "
                f"ctx.{self.name}.shard(x, layout, dim) makes shares, ctx.{self.name}.gather(x, layout, dim) makes wholes"
            )


@dataclass(frozen=True)
class TpSplit:
    """tp as parts x (tp / parts): weights that the ranks of one part share, such as those of a key-value head.

    mesh        this rank's DeviceMesh [parts, tp / parts]
    sums        Axis of dp x cp x the ranks of this rank's part: gradients of such weights are summed over it
    """

    mesh: DeviceMesh
    sums: Axis


class ParallelContext:
    """The mesh dp x cp x tp of one run, as one rank sees it. Make it with `from_env`, `from_config` or `single`.

    dp, cp, tp  `Axis`: data, context (tokens of one sequence), tensor (weights)
    dp_cp       Axis of all ranks that hold the same share of the weights: losses and gradients are summed over it
    world       Axis of all ranks of the mesh
    mesh        the DeviceMesh with dimensions dp, cp, tp; None for `single()`
    device      where this rank computes
    """

    def __init__(self, *, mesh: DeviceMesh | None, device: torch.device, timeout: float, owns_default: bool) -> None:
        """Use the constructors `from_env`, `from_config`, `single`."""
        self.mesh, self.device, self.timeout = mesh, device, timeout
        self.closed = False
        self.watches_optimizers = False
        self.on_close: list[Callable[[], object]] = []  # what other rooms must undo when this context ends
        self._owns_default, self._groups = owns_default, []
        self._splits: dict[int, TpSplit] = {}
        self._dp_cp_mesh: DeviceMesh | None = None
        if mesh is None:
            self.dp, self.cp, self.tp, self.dp_cp, self.world = (
                Axis(name, (0,), 0, None, device) for name in (*AXES, "dp_cp", "world")
            )
            for axis in (self.dp, self.cp, self.tp, self.dp_cp, self.world):
                axis.group = axis  # None would mean "all processes" to functions that take a group
            return
        ranks = mesh.mesh
        me = [int(i) for i in (ranks == dist.get_rank()).nonzero()[0]]
        self._groups = [mesh.get_group(name) for name in AXES]
        lines = [ranks[:, me[1], me[2]], ranks[me[0], :, me[2]], ranks[me[0], me[1], :]]
        self.dp, self.cp, self.tp = (
            Axis(name, tuple(line.tolist()), me[i], self._groups[i], device)
            for i, (name, line) in enumerate(zip(AXES, lines, strict=True))
        )
        self.dp_cp = self._over("dp_cp", (self.dp, self.cp), [ranks[:, :, t].flatten() for t in range(ranks.shape[2])])
        self.world = self._over("world", (self.dp_cp, self.tp), [ranks.flatten()])
        for group in self._groups:
            _set_timeout(group, timeout)

    def _over(self, name: str, parts: tuple[Axis, Axis], sets: list[Tensor]) -> Axis:
        """The axis that spans two others: the group of the only one larger than 1, else new groups, one for each of `sets`.

        Making a group is collective over the world, so every rank makes all of them, in this order.
        """
        wide = [axis for axis in parts if axis.size > 1] or [parts[0]]
        if len(wide) == 1:
            return Axis(name, wide[0].ranks, wide[0].rank, wide[0].group, self.device)
        mine = None
        for members in sets:
            group = dist.new_group(members.tolist(), timeout=timedelta(seconds=self.timeout))
            if dist.get_rank() in members:
                self._groups.append(group)
                mine = Axis(name, tuple(members.tolist()), members.tolist().index(dist.get_rank()), group, self.device)
        assert mine is not None
        return mine

    def split_tp(self, parts: int) -> TpSplit:
        """tp divided into `parts` (a divisor of it other than 1 and tp). Collective over the world the first time."""
        if parts not in self._splits:
            assert self.mesh is not None
            self.tp.require_open()
            share = self.tp.size // parts
            mesh = self.mesh["tp"]._unflatten(0, (parts, share), ("part", "share"))
            groups = [mesh.get_group(name) for name in ("part", "share")]
            for group in groups:
                _set_timeout(group, self.timeout)
            self._groups += groups
            mine = self.tp.rank // share
            ranks = tuple(self.tp.ranks[mine * share : (mine + 1) * share])
            tied = Axis("tp_share", ranks, self.tp.rank % share, groups[1], self.device)
            sets = [self.mesh.mesh[:, :, p * share : (p + 1) * share].flatten() for p in range(parts)]
            self._splits[parts] = TpSplit(mesh, self._over("dp_cp_share", (self.dp_cp, tied), sets))
        return self._splits[parts]

    def dp_cp_mesh(self) -> DeviceMesh:
        """dp x cp as a DeviceMesh of one dimension named dp_cp, for FSDP2. Collective over the world the first time."""
        if self._dp_cp_mesh is None:
            assert self.mesh is not None
            self.tp.require_open()
            self._dp_cp_mesh = self.mesh["dp", "cp"]._flatten("dp_cp")
            group = self._dp_cp_mesh.get_group()
            _set_timeout(group, self.timeout)
            self._groups.append(group)
        return self._dp_cp_mesh

    def group_for_files(self) -> dist.ProcessGroup:
        """A gloo group of all ranks for another thread, whose messages then never meet this one's. Collective over the world."""
        self.world.require_open()
        assert self.mesh is not None
        group = dist.new_group(self.mesh.mesh.flatten().tolist(), timeout=timedelta(seconds=self.timeout), backend="gloo")
        self._groups.append(group)
        return group

    # ---- constructors -------------------------------------------------------------------------------------------------

    @classmethod
    def from_env(
        cls, dp: int = -1, cp: int = 1, tp: int = 1, timeout: float = 300, device: str | torch.device | None = None
    ) -> ParallelContext:
        """The context of a process that torchrun started (or whose default process group already exists).

        dp, cp, tp  sizes of the axes; one may be -1, "what is left"; their product must be the number of processes
        timeout     seconds that any message may take, set on every group
        device      None = this rank's GPU under CUDA (NCCL), else the CPU (gloo)
        raises      Unsupported (a ValueError), before any group is made, when the sizes do not fit

        Without torchrun's variables and without a process group it is `single()`, if the sizes allow one process.
        """
        initialised = dist.is_available() and dist.is_initialized()
        launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        world = dist.get_world_size() if initialised else int(os.environ["WORLD_SIZE"]) if launched else 1
        sizes = resolve_sizes(dp, cp, tp, world, launched or initialised)
        timeout = _check_timeout(timeout)
        place = _device(device)
        if not (initialised or launched):
            return cls.single(device=place)
        if not initialised:
            _init_default_group(place, world, timeout)
        try:
            mesh = init_device_mesh(place.type, sizes, mesh_dim_names=AXES)
            return cls(mesh=mesh, device=place, timeout=timeout, owns_default=not initialised)
        except BaseException:
            if not initialised:
                dist.destroy_process_group()
            raise

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any] | Any) -> ParallelContext:
        """`from_env` with the keys dp, cp, tp, timeout (and device) of a mapping or an object; a whole config's `parallel` too.

        raises      Unsupported for a key it does not know
        """
        cfg = cfg["parallel"] if isinstance(cfg, Mapping) and "parallel" in cfg else getattr(cfg, "parallel", cfg)
        values = dict(cfg) if isinstance(cfg, Mapping) else dict(vars(cfg))
        values.pop("sequence_parallel", None)  # a matter of the layers, in the same group of the YAML
        known = ("dp", "cp", "tp", "timeout", "device")
        for key in values:
            if key not in known:
                raise Unsupported(f"parallel.{key} is not a key of ParallelContext; it takes {', '.join(known)}")
        return cls.from_env(**values)

    @classmethod
    def single(cls, device: str | torch.device | None = None) -> ParallelContext:
        """One process: no launcher, no process group, no mesh; every layer becomes an ordinary one."""
        return cls(mesh=None, device=_device(device), timeout=0.0, owns_default=False)

    # ---- life -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Destroy the groups this context made (and the default one if it started that). A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        for undo in self.on_close:
            undo()
        for axis in (self.dp, self.cp, self.tp, self.dp_cp, self.world, *(split.sums for split in self._splits.values())):
            axis.closed = True
        if self.mesh is None:
            return
        _forget_meshes()
        if not dist.is_initialized():
            return
        if self._owns_default:
            dist.destroy_process_group()
            return
        for group in {id(g): g for g in self._groups}.values():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelContext:
        return self  # a copied module lives on the same mesh

    # ---- for people -----------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """A picture of which rank holds what: one row for each cp share of each dp share, one column for each tp share."""
        dp, cp, tp = self.dp.size, self.cp.size, self.tp.size
        head = f"{dp * cp * tp} rank{'s' * (dp * cp * tp > 1)} = dp {dp} x cp {cp} x tp {tp}, on {self.device.type}"
        if self.mesh is None:
            return head + "\nrank 0 holds everything: whole sequences, whole weights"
        columns = [f"weights {t + 1}/{tp}" for t in range(tp)]
        width = max([len(c) for c in columns] + [len(f"rank {dp * cp * tp - 1}") + 1])
        rows = []
        for d in range(dp):
            for c in range(cp):
                label = f"sequences {d + 1}/{dp}  tokens {c + 1}/{cp}"
                cells = [int(self.mesh.mesh[d, c, t]) for t in range(tp)]
                marks = [f"rank {r}{'*' if r == dist.get_rank() else ''}" for r in cells]
                rows.append((label, marks))
        left = max(len(label) for label, _ in rows)
        line = " " * left + " +" + "+".join("-" * (width + 2) for _ in columns) + "+"
        picture = [head, (" " * left + "  " + " ".join(c.center(width + 2) for c in columns)).rstrip(), line]
        for label, marks in rows:
            picture.append(label.ljust(left) + " |" + "|".join(m.center(width + 2) for m in marks) + "|")
            picture.append(line)
        return (
            "\n".join(picture) + f"\n* this rank. tp: {list(self.tp.ranks)}  cp: {list(self.cp.ranks)}  dp: {list(self.dp.ranks)}"
        )

    def __repr__(self) -> str:
        return f"ParallelContext(dp={self.dp.size}, cp={self.cp.size}, tp={self.tp.size}, device={self.device})"


def backends() -> list[str]:
    """Which of the back ends that tpattn uses this torch has: gloo for the CPU, nccl for GPUs."""
    if not dist.is_available():
        return []
    return [name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there]


def resolve_sizes(dp: int, cp: int, tp: int, world: int, launched: bool = True) -> tuple[int, int, int]:
    """(dp, cp, tp) with -1 replaced, checked against the number of processes.

    raises      Unsupported with the equation, its numbers and the sizes that would work
    """
    sizes: dict[str, Any] = {"dp": dp, "cp": cp, "tp": tp}
    words = " x ".join(f"{name}={size!r}" for name, size in sizes.items())
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise Unsupported(
                f"{words} for {world} processes: {name}={size!r} must be a positive integer, or -1 for what is left; "
                + _suggest(world)
            )
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise Unsupported(f"{words} for {world} processes: only one of dp, cp, tp may be -1; {_suggest(world)}")
    known = 1
    for size in sizes.values():
        known *= size if size != -1 else 1
    if free and world % known == 0:
        sizes[free[0]] = world // known
    elif known != world:
        product = f"product {known}" + (f" times {free[0]}" if free else "")
        start = "" if launched else "; this process was not started by torchrun, so there is 1"
        remedy = f", or start {known} processes: torchrun --standalone --nproc-per-node {known}"
        raise Unsupported(f"{words}: {product} does not give the {world} processes there are{start}; {_suggest(world)}{remedy}")
    return sizes["dp"], sizes["cp"], sizes["tp"]


def _suggest(world: int) -> str:
    fits = [
        (world // c // t, c, t)
        for t in range(1, world + 1)
        if world % t == 0
        for c in range(1, world // t + 1)
        if world // t % c == 0
    ]
    fits = sorted(fits, key=lambda s: (max(s), s))[:4]
    return "sizes that work: " + ", ".join(f"dp={d} cp={c} tp={t}" for d, c, t in fits)


def _check_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise Unsupported(f"timeout={timeout!r} must be a positive number of seconds")
    return float(timeout)


def _device(device: str | torch.device | None) -> torch.device:
    """This rank's device: its own GPU under CUDA, set as current, or the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= count:
            raise Unsupported(
                f"local rank {local} has no GPU of its own, this host has {count}; start {count} processes or pass device='cpu'"
            )
        device = torch.device("cuda", local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise Unsupported(f"device={device} is not supported; tpattn runs on cpu (gloo) and cuda (NCCL)")
    return device


def _init_default_group(device: torch.device, world: int, timeout: float) -> None:
    """torch's default process group from torchrun's variables, under store keys of its own.

    The prefix names torchrun's attempt and this process's count: a restarted worker, or a second start in one process, would
    otherwise read the first one's addresses from the shared store (torch 2.13).
    """
    seconds = timedelta(seconds=timeout)
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=seconds)))
    except (ValueError, dist.DistError) as error:
        raise TpattnError(
            f"could not reach the other processes: {error}; start with torchrun --standalone --nproc-per-node {world} ..., which "
            "sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"tpattn/{attempt}/{next(_starts)}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=seconds)


def _forget_meshes() -> None:
    """Empty DTensor's cache of what its operations give.

    It holds meshes and takes those of equal sizes for one another: a parameter on a new mesh would name the groups of the closed
    one, which are gone, or by then another's (torch 2.13; to be deleted when DeviceMesh compares by its groups).
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def _set_timeout(group: Any, timeout: float) -> None:
    if dist.get_backend(group) == "fake":  # moves nothing, waits for nothing, and warns
        return
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)
