"""The README's code, run as it stands: the shortest training loop gives the same losses on every mesh."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import close, far, seeded
from pool import ranks

import tpattn
from scripts import make_tokens
from tpattn.config import load, parts
from tpattn.params import sharded_parameters, to_local, whole

README = Path(__file__).parents[1] / "README.md"


def loop_code():
    """The block under "The shortest training loop", verbatim."""
    section = README.read_text().split("## The shortest training loop")[1]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)


def run_loop(cp, tp, change=lambda code: code):
    """Its five losses, from rank 0's lines (empty on other ranks)."""
    argv, sys.argv = sys.argv, ["loop.py", str(cp), str(tp)]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(change(loop_code()), "loop.py", "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = argv
    return [float(x) for x in re.findall(r"loss ([0-9.]+)", out.getvalue())]


def plain_torch():
    """The same five steps without any group: the model of one process, torch's own loss and clipping."""
    ctx = tpattn.ParallelContext.single()
    model = tpattn.Transformer(257, 64, 2, 4, ctx=ctx, seed=0, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
    losses = []
    for step in range(5):
        rows = text[step * 260 : (step + 1) * 260].view(4, 65)
        loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ranks(2, 4)
@pytest.mark.parametrize("axis", ["cp", "tp", "dp", "half"])
def test_shortest_loop_is_the_same_on_every_mesh(rank, world, axis):
    """C04: the five printed losses equal those of plain torch within 1e-9, whichever axis the ranks are on."""
    sizes = {"cp": (world, 1), "tp": (1, world), "dp": (1, 1), "half": (2, world // 2)}[axis]
    losses = run_loop(*sizes)
    if rank == 0:
        close(losses, plain_torch(), 1e-9)
        far(losses[4:], losses[:1], 1e-2)  # it does train
    else:
        assert losses == []


@ranks(2)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (1, 1)], ids=["cp", "tp", "dp"])
def test_shortest_loop_without_its_sum_of_gradients_does_not_train_on(rank, world, sizes):
    """C04: with the line of finish_gradients removed, and clipping too, the step raises on every rank and names it."""
    def forget(*words):
        return lambda code: "".join(line for line in code.splitlines(True) if not any(word in line for word in words))

    for words, name in ((["finish_gradients"], "clip_grad_norm_"), (["finish_gradients", "clip_grad_norm_"], "AdamW.step")):
        with pytest.raises(tpattn.TpattnError, match=rf"{name}: .*finish_gradients"):
            run_loop(*sizes, forget(*words))


@ranks(2)
def test_the_loop_that_saves_goes_on_where_it_was(rank, world, tmp_path):
    """Twice as it stands: four checkpoints of which three stay, then nothing is left to do."""
    code = next(block for block in blocks() if "Saver" in block).replace('"checkpoints"', repr(str(tmp_path)))
    with tpattn.ParallelContext.from_env(tp=2, timeout=60) as ctx:
        model = tpattn.Transformer(257, 8, 1, 2, ctx=ctx, seed=0)
        names = {"tpattn": tpattn, "ctx": ctx, "model": model, "optimizer": torch.optim.AdamW(tpattn.param_groups(model))}
        for found in (None, 4):
            exec(code, names)
            assert (names["found"] and names["found"]["step"]) == found
            assert [p.name for p in sorted(tmp_path.iterdir())] == [f"step_00000{step}" for step in (2, 3, 4)]


def blocks():
    """Every python block of the README."""
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_commands_under_data_work(tmp_path, monkeypatch, capsys):
    """Those that make and check folders are run, those that train are read; on 25 texts, with a smaller vocabulary."""
    pytest.importorskip("tokenizers", reason='needs the extra hf: pip install "tpattn[hf]"')
    (tmp_path / "texts").mkdir()
    for i in range(25):
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(f"line {n} of document {i}: {n * n % 7}\n" for n in range(40)))
    monkeypatch.chdir(tmp_path)
    commands = re.search(r"## Data\n.*?```sh\n(.*?)```", README.read_text(), re.DOTALL).group(1).splitlines()
    commands = [command.split("#")[0].split() for command in commands]
    made = [command[2:] for command in commands if command[1] == "scripts/make_tokens.py"]
    for argv in made:
        monkeypatch.setattr(sys, "argv", ["make_tokens.py", *[word.replace("8192", "300") for word in argv]])
        make_tokens.main()
    assert len(made) == 3 and "as it was written: tokens" in capsys.readouterr().out
    trained = [command[command.index("scripts/train.py") + 1 :] for command in commands if "scripts/train.py" in command]
    assert len(trained) == 3
    with tpattn.ParallelContext.single(device="cpu") as ctx:
        for argv in trained:
            argv = [word for word in argv if not word.startswith("parallel=")]
            run = parts(load([*argv, "model=tiny", "train=smoke"], README.parent / "configs"), ctx)
            assert run.valid is not None
            assert run.model.vocab_size == (257 if argv == ["data.path=texts/"] else 300)


@ranks(4)
def test_the_other_code_runs(rank, world):
    """Layers alone, attention by itself and the ledger, as they stand, on the meshes they are written for."""
    layers, lora, attention, book = [b for b in blocks() if not re.search("tpattn.shard|Saver|generate", b)][1:5]
    with tpattn.ParallelContext.from_env(cp=2, tp=2, timeout=60) as ctx:
        names = {"torch": torch, "tpattn": tpattn, "ctx": ctx, "layout": tpattn.SequenceLayout.zigzag(11, 2)}
        exec(layers, names)
        assert names["y"].shape == names["x"].shape == (4, names["layout"].sizes[ctx.cp.rank], 64)
        exec(lora, names)
        assert names["down"](names["up"](names["x"])).shape == names["x"].shape
        names["loss"] = names["y"].square().sum()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(book, names)
        assert "all_reduce" in out.getvalue() and "exchange" in out.getvalue()
    whole = {name: seeded(1, 1024, 4, 8, seed=i) for i, name in enumerate("qkv")}
    mine = tpattn.SequenceLayout.zigzag(1024, 4).positions(rank)
    names = {name: x[:, mine] for name, x in whole.items()}
    exec(attention, names)
    mask = tpattn.masks.allowed(names["mask"], torch.arange(1024), 1024)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole.values()), attn_mask=mask)
    close(names["out"], want.transpose(1, 2)[:, mine])
    names["ctx"].close()


@ranks(4)
def test_the_code_that_generates_runs(rank, world):
    """The block under "Seeing what a run does", with fewer tokens."""
    (code,) = [block for block in blocks() if "generate" in block]
    with tpattn.ParallelContext.from_env(cp=2, tp=2, timeout=60) as ctx:
        model = tpattn.Transformer(257, 16, 1, 4, ctx=ctx, seed=0)
        names = {"model": model, "ids": [1, 2, 3], "ctx": ctx}
        exec(code.replace("max_new_tokens=200", "max_new_tokens=2"), names)
        assert 0 <= names["token"] < 257


@ranks(4)
@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)])
def test_the_fsdp_code_runs_and_gives_the_weights_of_one_process(rank, world, sizes):
    """The block under "FSDP2", as it stands: two uneven micro-batches are one step."""
    (code,) = [block for block in blocks() if "tpattn.shard" in block]
    ids = seeded(5, 14, seed=0, dtype=torch.int64) % 257

    def weights(ctx):
        layout = tpattn.SequenceLayout.zigzag(13, ctx.cp.size)
        rows = [part.tensor_split(ctx.dp.size)[ctx.dp.rank] for part in (ids[:3], ids[3:])]
        batches = [[ctx.cp.shard(x, layout) for x in (r[:, :-1], r[:, 1:])] for r in rows]
        names = {"torch": torch, "tpattn": tpattn, "ctx": ctx, "layout": layout, "micro_batches": batches,
                 "count": torch.tensor(sum(targets.numel() for _, targets in batches))}
        exec(code, names)
        return tpattn.whole_state_dict(names["model"])

    want = weights(tpattn.ParallelContext.single())
    with tpattn.ParallelContext.from_env(*sizes, timeout=60) as ctx:
        close(list(weights(ctx).values()), list(want.values()), 1e-8)
class Adapted(torch.nn.Module):
    """up, gelu, down with the README's adapters, whose weights are all drawn so that every one has a gradient."""

    def __init__(self, ctx, sp):
        super().__init__()
        names = {"torch": torch, "tpattn": tpattn, "ctx": ctx}
        torch.manual_seed(0)
        names["up"] = tpattn.ColumnParallelLinear(6, 11, ctx=ctx, sequence_parallel=sp, dtype=torch.float64)
        names["down"] = tpattn.RowParallelLinear(11, 6, ctx=ctx, sequence_parallel=sp, dtype=torch.float64)
        exec(blocks()[2], names)
        self.up, self.down = names["up"], names["down"]
        own = {"up.A": seeded(4, 6, seed=1), "up.B.weight": seeded(11, 4, seed=2), "down.A.weight": seeded(4, 11, seed=3),
               "down.B": seeded(6, 4, seed=4)}
        tpattn.load_whole_state_dict(self, tpattn.whole_state_dict(self) | own)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def undivided(state, x, g):
    """Output and gradient of x, and of the adapters by name, by plain torch."""
    w = {name: value.clone().requires_grad_("base" not in name) for name, value in state.items()}
    x = x.clone().requires_grad_()
    h = torch.nn.functional.gelu(x @ w["up.base.weight"].T + w["up.base.bias"] + x @ w["up.A"].T @ w["up.B.weight"].T)
    y = h @ w["down.base.weight"].T + w["down.base.bias"] + h @ w["down.A.weight"].T @ w["down.B"].T
    y.backward(g)
    return y, x.grad, {name: value.grad for name, value in w.items() if value.grad is not None}


def adapted(ctx, sp):
    """A model with the README's adapters everywhere, all weights drawn, and its loss on a fixed batch."""
    names = {"torch": torch, "tpattn": tpattn, "ctx": ctx}
    names["up"] = names["down"] = torch.nn.Module()
    exec(blocks()[2].split("torch.manual_seed")[0], names)
    torch.manual_seed(0)
    options = {"seed": 1, "sequence_parallel": sp, "gate": True, "dtype": torch.float64}
    model = names["adapt"](tpattn.Transformer(31, 24, 2, 6, 2, ctx=ctx, **options), 3, ctx)
    state = tpattn.whole_state_dict(model)
    own = {name: 0.3 * seeded(*x.shape, seed=i) for i, (name, x) in enumerate(state.items()) if ".A" in name or ".B" in name}
    tpattn.load_whole_state_dict(model, state | own)
    ids, layout = seeded(2, 12, seed=3, dtype=torch.int64) % 31, tpattn.SequenceLayout.zigzag(11, ctx.cp.size)
    x, y = (ctx.cp.shard(z, layout) for z in (ids[:, :-1], ids[:, 1:]))
    loss = tpattn.token_mean(model.loss(x, y, layout=layout), torch.tensor(y.numel()), ctx=ctx)
    loss.backward()
    tpattn.finish_gradients(model, check=True)
    norm = tpattn.clip_grad_norm_(model.parameters(), 1e9)
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    return [loss.detach(), norm, *tpattn.whole_state_dict(model).values()], trained


@ranks(2, 4)
@pytest.mark.parametrize("sp", [False, True])
def test_a_transformer_with_adapters_everywhere_trains_as_one_process_does(rank, world, sp):
    """q, k, v, gates, out and the MLP of every block: loss, norm and the weights after a step; 6 and 2 heads, also on tp=4."""
    want, trained = adapted(tpattn.ParallelContext.single(), False)
    assert len(trained) == 2 * (4 + 2 + 2 * 3)
    for sizes in ((1, 1, 2), (1, 2, 1)) if world == 2 else ((1, 1, 4), (1, 2, 2)):
        with tpattn.ParallelContext.from_env(*sizes, timeout=60) as ctx:
            got, same = adapted(ctx, sp)
            assert same == trained
            close(got, want, 1e-9)


@ranks(2, 4)
@pytest.mark.parametrize("sp", [False, True])
def test_adapters_equal_the_undivided_ones(rank, world, sp):
    """LoRA beside frozen layers: output and every gradient on tp=2 and on dp=2 x tp=2; a wrong rule is named by the check."""
    x, g = seeded(2, 5, 6, seed=5), seeded(2, 5, 6, seed=6)
    with tpattn.ParallelContext.from_env(dp=world // 2, tp=2, timeout=60) as ctx:
        def share(z):
            z = z.tensor_split(ctx.dp.size)[ctx.dp.rank]
            return z.split([3, 2], dim=1)[ctx.tp.rank] if sp else z

        def one_step(model):
            mine = share(x).clone().requires_grad_()
            y = model(mine)
            y.backward(share(g))
            return y, mine.grad

        model = Adapted(ctx, sp)
        want_y, want_x, want = undivided(tpattn.whole_state_dict(model), x, g)
        close(one_step(model), [share(want_y), share(want_x)])
        tpattn.finish_gradients(model, check=True)
        specs = {id(m.get_parameter(key)): spec for _, m, key, spec in sharded_parameters(model)}
        got = {name: whole(to_local(p.grad), specs[id(p)], ctx.tp) if id(p) in specs else p.grad
               for name, p in model.named_parameters() if p.grad is not None}
        assert set(got) == set(want) == {"up.A", "up.B.weight", "down.A.weight", "down.B"}
        for name, grad in want.items():
            close(got[name], grad)
        wrong = "same" if sp else "partial"
        for name in ("up.A", "down.B"):
            model = Adapted(ctx, sp)
            part = model.get_submodule(name[:-2])
            setattr(part, name[-1], tpattn.replicated(getattr(part, name[-1]), ctx, wrong))
            one_step(model)
            with pytest.raises(tpattn.TpattnError, match=rf"the gradient of {name} .*grad='{wrong}'"):
                tpattn.finish_gradients(model, check=True)


def test_shortest_loop_runs_as_a_script(tmp_path):
    """C04: copied verbatim to a file and run by one process, it prints plain torch's five losses and nothing else."""
    script = tmp_path / "loop.py"
    script.write_text(loop_code())
    done = subprocess.run([sys.executable, str(script), "1", "1"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    close([float(x) for x in re.findall(r"loss ([0-9.]+)", done.stdout)], plain_torch(), 1e-9)
    assert len(done.stdout.splitlines()) == 5


def test_readme_names_only_what_exists():
    """Every `tpattn.name` in the README's code and text is an attribute of the package."""
    names = set(re.findall(r"tpattn\.([a-zA-Z_]+)", README.read_text())) - {"git"}
    assert not [n for n in sorted(names) if not hasattr(tpattn, n)]
