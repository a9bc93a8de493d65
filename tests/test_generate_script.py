"""scripts/generate.py: from a run's checkpoint, on one process in this one, and under torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scripts import generate as script
from tpattn import ParallelContext, checkpoint
from tpattn.config import Config, build
from tpattn.data import ByteTokenizer
from tpattn.decode import generate

ROOT = Path(__file__).resolve().parents[1]
SAMPLED = ["--temperature", "1.5", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "12"]


def small_config():
    cfg = Config()
    cfg.model.hidden, cfg.model.num_layers, cfg.model.num_heads, cfg.model.ffn = 16, 1, 4, 24
    cfg.train.dtype, cfg.train.seq_len = "float64", 32
    return cfg


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose checkpoint has a new model: its text is noise, but always the same."""
    import dataclasses

    folder, cfg = tmp_path_factory.mktemp("run"), small_config()
    ctx = ParallelContext.single()
    about = {"config": dataclasses.asdict(cfg), "text": "0"}
    checkpoint.save(folder / checkpoint.FOLDER, build(cfg, ctx), None, ctx=ctx, step=1, about=about)
    return folder


def wanted(prompt, **options):
    """The text by the library."""
    ctx = ParallelContext.single()
    ids = ByteTokenizer().encode(prompt).tolist() or [256]
    new = generate(build(small_config(), ctx), ids, ctx=ctx, end=256, window=32, **options)
    return ByteTokenizer().decode([*ids, *new]) + "\n"


def sampled(prompt):
    return wanted(prompt, max_new_tokens=12, temperature=1.5, top_p=0.9, seed=3)


@pytest.fixture
def start(monkeypatch, capfd):
    """start(*argv): exit status, output and errors of the script's main in this process."""

    def start(*argv):
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, argv)])
        monkeypatch.delenv("RANK", raising=False)
        with pytest.raises(SystemExit) as leave:
            script.main()
        said = capfd.readouterr()
        return int(leave.value.code or 0), said.out, said.err

    return start


def test_the_text_is_that_of_the_library(start, run):
    """Greedy, sampled, a prompt longer than the window, an empty one, letters of several bytes."""
    assert start(run, "Ein Wörtchen", *SAMPLED) == (0, sampled("Ein Wörtchen"), "")
    checkpoint, long = run / "checkpoints" / "step_000001", "x" * 50
    assert start(checkpoint, long, "--max-new-tokens", 3) == (0, wanted(long, max_new_tokens=3), "")
    assert start(run, "", *SAMPLED) == (0, sampled(""), "")
    assert sampled("a") != sampled("b")


def test_the_prompt_from_standard_input(start, run, monkeypatch, tmp_path):
    (tmp_path / "prompt").write_bytes("zwei\nZeilen – ".encode())
    with (tmp_path / "prompt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert start(run, "-", *SAMPLED) == (0, sampled("zwei\nZeilen – "), "")
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    with (tmp_path / "prompt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert start(run, "-") == (1, "", "error: the prompt is not UTF-8: byte 0xff at offset 2\n")


def test_mistakes_are_one_message(start, run, tmp_path):
    ctx = ParallelContext.single()
    checkpoint.save(tmp_path / "bare", torch.nn.Linear(2, 2), None, ctx=ctx, step=1)
    other = {"config": {}, "tokenizer": {"kind": "pieces"}}
    checkpoint.save(tmp_path / "other", torch.nn.Linear(2, 2), None, ctx=ctx, step=1, about=other)
    for argv, told in (
        ([tmp_path / "nowhere", "a"], "nowhere: no such folder"),
        ([tmp_path, "a"], "no checkpoint: it has no manifest.json"),
        ([tmp_path / "bare", "a"], "its checkpoint does not say which model it is of"),
        ([tmp_path / "other", "a"], "pieces"),
        ([run, "a", "--tp", "2"], "start 2 processes: torchrun"),
        ([run, "a", "--temperature", "-1"], "temperature=-1.0; needed"),
        ([run, "a", "--top-p", "0"], "top_p=0.0; needed"),
        ([run, "a", "--max-new-tokens", "-1"], "max-new-tokens=-1: needed: 0 or more"),
        ([run], "the following arguments are required: prompt"),
        ([run, "a", "--topp", "1"], "--topp"),
    ):
        status, out, err = start(*argv)
        assert (status, out) == (1, ""), argv
        assert err.startswith("error: ") and err.count("\n") == 1 and told in err, err


def test_on_a_terminal_control_characters_are_not_sent(monkeypatch, capsys):
    for terminal, told in ((False, "a\x1b[2J\tä\n\n"), (True, "a\ufffd[2J\tä\n\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        out = script.Output(True, ByteTokenizer(), script.Stop())
        out.write(list("a\x1b[2J\tä\n".encode()))
        out.close()
        assert capsys.readouterr().out == told


def launch(ranks, *argv, **options):
    command = [sys.executable]
    command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK")}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**kept, "OMP_NUM_THREADS": "1"}, **options}
    return subprocess.Popen([*command, str(ROOT / "scripts" / "generate.py"), *map(str, argv)], **options)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [("--tp", 2), pytest.param(("--tp", 2, "--cp", 2), marks=pytest.mark.long)])
def test_under_torchrun_the_same_text_comes_once(run, mesh):
    """Two halves of the weights, and two of the tokens; the prompt from standard input, which one rank reads."""
    process = launch(len(mesh), run, "-", *mesh, *SAMPLED, stdin=subprocess.PIPE)
    out, err = process.communicate("Ein Wörtchen".encode(), timeout=100)
    assert (process.returncode, out.decode(), err) == (0, sampled("Ein Wörtchen"), b"")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reader_that_goes_away_ends_it_quietly(run, ranks):
    """A hundred thousand tokens are asked for; after the first ones nobody reads."""
    process = launch(ranks, run, "abc", "--max-new-tokens", 100_000)
    assert process.stdout.read(8).startswith(b"abc")
    process.stdout.close()
    begin = time.monotonic()
    assert process.wait(timeout=60) == 0
    assert time.monotonic() - begin < 20
    assert process.stderr.read() == b""


def test_ctrl_c_ends_it_quietly(start, run, monkeypatch):
    """After the third token, with what was written so far and a line's end; pytest's own handler is back afterwards."""
    before = signal.getsignal(signal.SIGINT)

    def interrupted(*arguments, **options):
        for count, token in enumerate(generate(*arguments, **options)):
            if count == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield token

    monkeypatch.setattr(script, "generate", interrupted)
    assert start(run, "abc", "--max-new-tokens", 100_000) == (130, wanted("abc", max_new_tokens=3), "")
    assert signal.getsignal(signal.SIGINT) is before
