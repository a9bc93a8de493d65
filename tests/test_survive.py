"""Runs that are killed, stopped and told to leave, under torchrun as users start them: they end as if nothing had happened."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoint_files import read_tensors

from tpattn.training import read_metrics

ROOT = Path(__file__).resolve().parents[1]
STEPS, EVERY = 6, 2
PLAN = [*["model=tiny", "train=smoke", "data.path=text", "run.dir=run", "optim.warmup_steps=2"],
        *[f"train.steps={STEPS}", f"train.checkpoint_every={EVERY}", "train.checkpoint_keep=0"]]

# Ends the process by SIGKILL at the moment that KILL names: rank, where, how many times that must have happened. In the first
# attempt of torchrun alone.
SCRIPT = """
import os, runpy, signal, sys, time
sys.path.insert(0, sys.argv.pop(1))
print("pid", os.environ.get("RANK", "0"), os.getpid(), flush=True)
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" or "RANK" not in os.environ:
    rank, where, count = os.environ["KILL"].split(",")
    if rank == os.environ.get("RANK", "0"):
        def killing(owner, name, after=False):
            do, calls = getattr(owner, name), [0]
            def wrapped(*args, **kwargs):
                calls[0] += 1
                if calls[0] == int(count) and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                done = do(*args, **kwargs)
                if calls[0] == int(count):
                    os.kill(os.getpid(), signal.SIGKILL)
                return done
            setattr(owner, name, wrapped)

        import torch
        from tpattn import config, model, gradients
        from tpattn.checkpoint import files, storage
        from tpattn.training import loop
        if where == "start":
            os.kill(os.getpid(), signal.SIGKILL)
        killing(*{
            "init": (model.Transformer, "__init__"),
            "forward": (model.Transformer, "forward"),
            "backward": (torch.Tensor, "backward", True),
            "finish": (loop, "finish_gradients", True),
            "step": (torch.optim.AdamW, "step", True),
            "draft": (files, "begin", True),
            "write": (storage, "_bytes_of"),
            "sync": (os, "fsync"),
            "index": (files, "write_json", True),
            "publish": (files, "publish"),
            "rename": (files.Path, "rename"),
            "renamed": (files.Path, "rename", True),
            "prune": (files, "prune"),
        }[where])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# (rank, where, count): drawn once; ranks 2, in the saves at steps 2 and 4, whose files only rank 0 completes
ON_ANY = ["start", "init", "forward", "backward", "finish", "step", "write", "sync"]
ON_RANK0 = ["draft", "index", "publish", "rename", "renamed", "prune"]


SAMPLE = "rename"  # of the moments, where there is no --all


def moments(more=0):
    """One for each place, and `more` drawn ones: rank, where, count."""
    draw, places = random.Random(5), [*ON_ANY, *ON_RANK0]
    places += [draw.choice(places) for _ in range(more)]
    drawn = []
    for where in places:
        count = draw.randint(3, STEPS) if where in ON_ANY[2:6] else draw.randint(1, 2) if where not in ON_ANY[:2] else 1
        drawn.append((draw.randrange(2) if where in ON_ANY else 0, where, count))
    return [",".join(map(str, moment)) for moment in drawn]


def pytest_generate_tests(metafunc):
    """`./scripts/test.sh tests/test_survive.py --all --kills 100` kills at 100 more moments."""
    if "kill" in metafunc.fixturenames:
        every = moments(metafunc.config.getoption("--kills"))
        marked = [pytest.param(m, marks=[] if f",{SAMPLE}," in m else pytest.mark.long) for m in dict.fromkeys(every)]
        metafunc.parametrize("kill", marked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where users work: a text, and the script that kills."""
    place = tmp_path_factory.mktemp("survive")
    (place / "text").mkdir()
    for i in range(12):
        (place / "text" / f"{i}.txt").write_text("".join(f"line {n} of document {i}: {n * n % 7}\n" for n in range(40)))
    (place / "script.py").write_text(SCRIPT)
    return place


def command(ranks, *argv, restarts=0, single=False):
    script = ["script.py", str(ROOT), str(ROOT / "scripts" / "train.py"), *argv]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return [sys.executable, *(script if single else [*launch, *script])]


def environment(kill):
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "KILL": kill}


def launch(cwd, *words, kill="-1,start,1", limit=100, **options):
    """The finished process."""
    return subprocess.run(command(*words, **options), cwd=cwd, env=environment(kill), capture_output=True, text=True,
                          timeout=limit, check=False)


def prints(folder):
    """What a run must end with, whatever happened to it: losses and norms of all steps, and every tensor's bytes.

    Without torch's own random state, which nothing draws from here and which each start seeds anew.
    """
    tensors = read_tensors(folder / "checkpoints" / f"step_{STEPS:06}")
    kept = {n: x.reshape(-1).view(torch.uint8).numpy().tobytes() for n, x in tensors.items() if not n.startswith("random.")}
    return [(e["step"], e["loss"], e["grad_norm"]) for e in read_metrics(folder)], kept


def same(got, want):
    assert got[0] == want[0]
    assert [name for name, raw in want[1].items() if got[1].get(name) != raw] == []


@pytest.fixture(scope="module")
def undisturbed(folder):
    done = launch(folder, 2, *PLAN[:3], "run.dir=whole", *PLAN[4:], "parallel=tp2")
    assert (done.returncode, done.stderr) == (0, "")
    return prints(folder / "whole")


def test_a_run_that_loses_a_rank_is_restarted_and_ends_with_the_same_bits(folder, undisturbed, tmp_path, kill):
    """SIGKILL at a drawn moment; torchrun --max-restarts 1. At most the steps since the last checkpoint are made again."""
    (tmp_path / "text").symlink_to(folder / "text")
    (tmp_path / "script.py").symlink_to(folder / "script.py")
    done = launch(tmp_path, 2, *PLAN, "parallel=tp2", kill=kill, restarts=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^pid \d", done.stdout, re.M)) == 4  # each rank started twice
    same(prints(tmp_path / "run"), undisturbed)
    again = [int(step) for step in re.findall(r"^step (\d+)/", done.stdout, re.M)]
    assert len(again) - len(set(again)) <= EVERY + 1, again  # + 1: a step was begun when its checkpoint was still being written
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [f"step_{step:06}" for step in range(EVERY, STEPS + 1, EVERY)]


# -------------------------------------------------------------------------------------------------------------------- SIGTERM


def started(cwd, *words, kill="-1,start,1", **options):
    """A process, the lines of its output as they come, and a function that waits for one that matches."""
    process = subprocess.Popen(command(*words, **options), cwd=cwd, env=environment(kill), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    lines, news = [], threading.Condition()

    def read():
        for line in process.stdout:
            with news:
                lines.append(line)
                news.notify()

    threading.Thread(target=read, daemon=True).start()

    def until(pattern, limit=60):
        end = time.monotonic() + limit
        with news:
            while True:
                for line in lines:
                    if found := re.search(pattern, line):
                        return found
                if not news.wait(end - time.monotonic()) and time.monotonic() > end:
                    raise AssertionError(f"{pattern!r} did not come in {limit} s:\n{''.join(lines)}")

    return process, lines, until


@pytest.fixture
def place(folder, tmp_path):
    (tmp_path / "text").symlink_to(folder / "text")
    (tmp_path / "script.py").symlink_to(folder / "script.py")
    return tmp_path


@pytest.mark.long
def test_sigterm_saves_and_leaves_with_0_and_the_run_goes_on(place):
    """One of two ranks gets it, more than once; both save the same step. The second start ends as if nothing had happened."""
    long = [word for word in PLAN if "steps" not in word and "every" not in word]
    process, lines, until = started(place, 2, *long, "parallel=tp2", "train.steps=100000", "train.checkpoint_every=0")
    pid = int(until(r"pid 1 (\d+)")[1])
    until(r"^step +3/")
    for _ in range(3):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.01)
    assert process.wait(60) == 0, "".join(lines)
    told = until(r"^stopped by SIGTERM, saved after step (\d+); the same command with run.dir=run goes on")
    step = int(told[1])
    assert [p.name for p in (place / "run" / "checkpoints").iterdir()] == [f"step_{step:06}"]
    assert [e["step"] for e in read_metrics(place / "run")] == list(range(1, step + 1))
    done = launch(place, 2, *long, "parallel=tp2", "train.steps=100000", f"train.stop_at={step + 1}")
    assert (done.returncode, f"resume  after step {step}" in done.stdout) == (0, True)


@pytest.mark.parametrize("moment", [*(pytest.param(m, marks=pytest.mark.long) for m in ("pid 0", "^run ")), "^step +1/"])
def test_sigterm_on_one_process_at_any_moment(place, moment):
    """While it starts nothing has been made and nothing is saved; it leaves with 0 as well."""
    process, lines, until = started(place, 1, *PLAN[:5], "train.steps=100000", single=True)
    until(moment)
    time.sleep(1.0 if moment == "pid 0" else 0)
    process.send_signal(signal.SIGTERM)
    code = process.wait(60)
    if moment == "pid 0" and code == -signal.SIGTERM:
        return  # Python had not come to the script's first line
    assert code == 0, "".join(lines)
    saved = until(r"^stopped by SIGTERM(?:, saved after step (\d+))?;")
    assert saved[1] is None or (place / "run" / "checkpoints" / f"step_{int(saved[1]):06}").exists()


@pytest.mark.long
def test_ctrl_c_saves_and_leaves(place):
    """The first one; tests/test_stop.py has the second."""
    process, lines, until = started(place, 1, *PLAN[:3], "run.dir=c", "train.steps=100000", single=True)
    until(r"^step +1/")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, "".join(lines)
    step = int(until(r"^stopped by Ctrl-C, saved after step (\d+)")[1])
    assert (place / "c" / "checkpoints" / f"step_{step:06}").exists()


# -------------------------------------------------------------------------------------------------------------------- SIGSTOP


@pytest.mark.long
def test_a_rank_that_sleeps_for_less_than_the_timeout_changes_nothing(place, undisturbed):
    process, lines, until = started(place, 2, *PLAN, "parallel=tp2", "parallel.timeout=30")
    pid = int(until(r"pid 1 (\d+)")[1])
    until(r"^step +2/")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(pid, signal.SIGCONT)
    assert process.wait(60) == 0, "".join(lines)
    same(prints(place / "run"), undisturbed)


@pytest.mark.long
def test_a_rank_that_sleeps_for_longer_ends_the_run_with_a_named_error(place, undisturbed):
    """And the next start goes on from the last checkpoint."""
    process, lines, until = started(place, 2, *PLAN, "parallel=tp2", "parallel.timeout=4")
    pid = int(until(r"pid 1 (\d+)")[1])
    until(r"^step +3/")
    os.kill(pid, signal.SIGSTOP)
    until(r"(CollectiveTimeout|PeerLost|CheckpointError).*", 40)
    os.kill(pid, signal.SIGCONT)
    assert process.wait(60) != 0
    done = launch(place, 2, *PLAN, "parallel=tp2")
    assert (done.returncode, done.stderr) == (0, "")
    same(prints(place / "run"), undisturbed)
