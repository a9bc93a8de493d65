"""scripts/train.py and scripts/compare.py: on one process in this one, and under torchrun as a user starts them."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_files import read_tensors

from scripts import compare, export, generate, train
from tpattn import ParallelContext, whole_state_dict
from tpattn.checkpoint import import_weights
from tpattn.config import Config, build, saved_model
from tpattn.data import read_documents, tokenizer_from, train_tokenizer
from tpattn.training import read_metrics

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["model=tiny", "train=smoke", "data.path=text"]


@pytest.fixture
def text(tmp_path, monkeypatch):
    """The folder the user works in, with a folder of documents."""
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / "text" / f"{i}.txt").write_text("".join(f"line {n} of document {i}: {n * n % 7}\n" for n in range(40)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


@pytest.fixture
def start(text, monkeypatch, capfd):
    """start(*argv, script=) runs a script's main here, on one process: its exit status, and the lines of output and of errors."""

    def start(*argv, script=train):
        monkeypatch.setattr(sys, "argv", [script.__file__, *argv])
        monkeypatch.chdir(text)
        try:
            getattr(script.main, "__wrapped__", script.main)()  # without torchrun's recorder, which is for its own processes
            status = 0
        except SystemExit as leave:
            status = int(leave.code or 0)
        said = capfd.readouterr()
        return status, said.out.splitlines(), said.err.splitlines()

    return start


def losses(folder):
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in read_metrics(folder)]


# -------------------------------------------------------------------------------------------------------------- one process


def test_a_run_tells_what_it_does_and_leaves_its_files(start, text):
    status, out, err = start(*SMALL, "run.dir=out/a run", "train.steps=4", "train.log_every=2")
    assert (status, err) == (0, [])
    told = [line.split("   loss")[0] for line in out]
    assert told[:2] == ["1 rank = dp 1 x cp 1 x tp 1, on cpu", "rank 0 holds everything: whole sequences, whole weights"]
    assert told[2] == f"text    {text / 'text'}"
    assert told[3].startswith("        12 documents, ")
    at = told.index(f"run     {Path('out/a run')}")
    assert told[at + 1 : at + 4] == ["step 1/4", "step 2/4", "step 4/4"]
    assert told[at + 4].startswith("sample  ")
    assert [line.split()[0] for line in out[-6:]] == ["total", "loss", "cost", "picture", "write", "next"]
    assert re.fullmatch(r"total   4 steps in \d:\d\d, 1,024 tokens, [\d,]+ tokens/s", out[-6])
    seen = [loss for _, loss, _ in losses("out/a run")]
    best = f"{min(seen):.4f} at best, step {seen.index(min(seen)) + 1}"
    assert out[-5] == f"loss    {seen[-1]:.4f} at the end, {best}"
    assert re.fullmatch(r"cost    0\.\d\d GB of memory at most on a rank.*", out[-4])
    assert out[-3] == "picture out/a run/loss.png"
    assert re.fullmatch(r"write   .*python'? .*generate\.py'? 'out/a run' 'line 0 of document 0: 0' --t.* --top-p 0\.95", out[-2])
    assert re.fullmatch(r"next    .*python'? .*train\.py'? model=tiny train=smoke .*data\.path=FILE_OR_FOLDER", out[-1])
    assert all(len(line) <= 100 for line in out[:-2])
    folder = text / "out" / "a run"
    files = ["checkpoints", "config.yaml", "loss.png", "metrics.csv", "metrics.jsonl"]
    assert sorted(p.name for p in folder.iterdir()) == files
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step_000004"]
    always = {"step", "loss", "grad_norm", "tokens_per_second"}
    assert [set(entry) - always - {"comm_share"} for entry in read_metrics(folder)] == [
        {"memory_bytes"}, {"memory_bytes"}, set(), {"memory_bytes"}]        # looked at for the steps that got a line
    assert all(always <= set(entry) for entry in read_metrics(folder))
    assert [entry["step"] for entry in read_metrics(folder)] == [1, 2, 3, 4]


def test_a_run_that_stopped_goes_on_as_if_nothing_had_happened(start, text):
    """stop_at saves and stops, the schedule still planned for all steps; the resumed run's losses are those of a run without."""
    plan = [*SMALL, "train.steps=7", "optim.warmup_steps=2"]
    assert start(*plan, "run.dir=whole")[0] == 0
    status, out, err = start(*plan, "run.dir=parts", "train.stop_at=3")
    assert (status, err) == (0, [])
    assert out[-1].endswith("train.steps=7 optim.warmup_steps=2 run.dir=parts")
    assert [step for step, *_ in losses("parts")] == [1, 2, 3]
    (text / "parts" / "metrics.jsonl").open("a").write('{"step": 4, "loss": 0.0, "grad_norm": 0.0}\n{"step": 5')  # a killed run's
    status, out, err = start(*plan, "run.dir=parts")
    assert (status, err) == (0, [])
    assert "resume  after step 3" in out and not any(line.startswith("        train") for line in out)
    assert losses("parts") == losses("whole")
    assert len(losses("whole")) == 7
    one, other = (read_tensors(text / which / "checkpoints" / "step_000007") for which in ("whole", "parts"))
    assert all(torch.equal(x, other[name]) for name, x in one.items() if not name.startswith("random."))
    status, out, err = start(*plan, "run.dir=parts", "train.seed=3", "train.steps=7")
    assert (status, err) == (0, [])
    at = out.index("resume  after step 7")
    assert out[at + 1 : at + 3] == [
        "        train.seed was 0, is now 3",
        "        nothing is left to do; train.steps, or train.stop_at, says how far to go",
    ]
    assert losses("parts") == losses("whole")


def test_the_text_at_the_end_is_what_the_printed_command_writes(start, text):
    """The sample begins a document; the command under `write` goes on from its first line, by the checkpoint alone."""
    status, out, err = start(*SMALL, "run.dir=a", "train.steps=3")
    assert (status, err) == (0, [])
    at = next(i for i, line in enumerate(out) if line.startswith("sample  "))
    assert out[at + 1] == "        line 0 of document 0: 0"
    words = shlex.split(next(line for line in out if line.startswith("write ")).removeprefix("write"))
    assert Path(words[1]).name == "generate.py" and words[3] == "line 0 of document 0: 0"
    (text / "text" / "0.txt").unlink()
    status, written, err = start(*words[2:], "--max-new-tokens", "5", script=generate)
    assert (status, err) == (0, [])
    assert written[0].startswith("line 0 of document 0: 0")


def test_the_summary_tells_what_a_longer_run_has(tmp_path):
    """Validation, communication, the highest memory; a run that made no step has none."""
    cfg = Config()
    assert list(train.summary(cfg, tmp_path)) == []
    rows = [{"step": s, "loss": 4.0 - s, "grad_norm": 1.0, "tokens_per_second": 512.0, "comm_share": s / 10} for s in (1, 2, 3)]
    rows[1] |= {"memory_bytes": 3 * 10**9, "valid_loss": 2.25}
    rows[2] |= {"memory_bytes": 2 * 10**9, "valid_loss": 2.5, "loss": 2.125}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(train.summary(cfg, tmp_path)) == [
        "total   3 steps in 0:12, 6,144 tokens, 512 tokens/s",
        "loss    2.1250 at the end, 2.0000 at best, step 2; on held-out documents 2.5000, at best 2.2500",
        "cost    3.00 GB of memory at most on a rank, 20% of the time in communication",
    ]


def test_checkpoints_every_few_steps_and_resuming_from_one_by_its_path(start, text):
    """The later lines of metrics.jsonl are cut in the run's own folder; another run.dir starts with the step after."""
    assert start(*SMALL, "run.dir=a", "train.steps=5", "train.checkpoint_every=2")[0] == 0
    assert sorted(p.name for p in (text / "a" / "checkpoints").iterdir()) == ["step_000002", "step_000004", "step_000005"]
    before = losses("a")
    status, out, _ = start(*SMALL, "run.dir=a", "train.steps=5", "train.resume=a/checkpoints/step_000002", "train.stop_at=3")
    assert status == 0 and "resume  after step 2" in out
    assert losses("a") == before[:3]
    left = [f"        a/checkpoints/step_{step:06}.left is of the steps that are made anew now: set aside" for step in (5, 4)]
    at = out.index("resume  after step 2")
    assert out[at + 1 : at + 3] == left
    (text / "text" / "12.txt").write_text("a new document")
    status, out, _ = start(*SMALL, "run.dir=b", "train.steps=5", "train.resume=a", "optim.lr=1e-4")
    at = out.index("resume  after step 3")
    changes = ["optim.lr was 0.003, is now 0.0001", "the text is another one: its sha256 differs"]
    assert [line.strip() for line in out[at + 1 : at + 3]] == changes
    assert [step for step, *_ in losses("b")] == [4, 5]


@pytest.mark.parametrize("resume", ["a/checkpoints/step_000002", "false"])
def test_torchruns_next_attempt_goes_on_with_its_own_run(start, text, monkeypatch, resume):
    """Not anew from the checkpoint, or the start, that the command names: nothing is set aside, no step is made twice."""
    assert start(*SMALL, "run.dir=a", "train.steps=4", "train.checkpoint_every=2")[0] == 0
    plan = [*SMALL, "run.dir=b", "train.steps=4", f"train.resume={resume}", "train.checkpoint_every=1"]
    assert start(*plan, "train.stop_at=3")[0] == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    status, out, _ = start(*plan)
    assert status == 0 and "resume  after step 3" in out and not any("set aside" in line for line in out)
    assert losses("b")[-1] == losses("a")[-1]


def test_a_resumed_run_says_when_tokenizer_or_held_out_documents_are_others(start, text):
    """Compared by what the tokenizer is, not by its place; a checkpoint carries it."""
    pytest.importorskip("tokenizers", reason='needs the extra hf: pip install "tpattn[hf]"')
    learnt = train_tokenizer(read_documents("text").documents, 280)
    for name in ("a.json", "b.json"):
        (text / name).write_text(learnt.state()["json"])
    plan = [*SMALL, "model.vocab_size=280", "train.steps=1", "run.dir=a"]
    assert start(*plan, "data.tokenizer=a.json", "data.valid=0.2")[0] == 0
    kept = json.loads((text / "a" / "checkpoints" / "step_000001" / "metadata.json").read_text())["about"]["tokenizer"]
    assert torch.equal(tokenizer_from(kept).encode("line 7 of"), learnt.encode("line 7 of"))
    for more, told in (
        (["data.tokenizer=b.json", "data.valid=0.2"], []),
        (["data.tokenizer=b.json"], ['data.valid was 0.2, is now "auto"']),
        (["data.valid=0.2"], ["the tokenizer is another one"]),
    ):
        status, out, err = start(*plan, *more)
        assert (status, err) == (0, [])
        at = out.index("resume  after step 1")
        *changes, rest = [line.strip() for line in out[at + 1 : at + 2 + len(told)]]
        assert changes == told and rest.startswith("nothing is left to do"), out
    assert any("held out for validation" in line for line in out)


def test_a_runs_weights_go_into_one_file_for_other_programs_and_back(start, text):
    """scripts/export.py: names and shapes of the undivided model, and what makes the model again; nothing of the machine."""
    pytest.importorskip("safetensors", reason='needs the extra hf: pip install "tpattn[hf]"')
    from safetensors.torch import load_file

    assert start(*SMALL, "run.dir=a", "train.steps=1")[0] == 0
    status, out, err = start("a", "out/model.safetensors", script=export)
    assert (status, err) == (0, []) and re.fullmatch(r".*model.safetensors: [\d,]+ weights, [\d,]+ bytes", out[0]), out
    ctx = ParallelContext.single()
    model, tokenizer, cfg = saved_model("a", ctx)
    state = load_file(text / "out" / "model.safetensors")
    assert all(torch.equal(state[name], x) for name, x in whole_state_dict(model).items())
    twin = build(cfg, ctx)
    about = import_weights(twin, "out/model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert about["tokenizer"] == tokenizer.state() and about["config"]["model"]["hidden"] == cfg.model.hidden
    assert str(text) not in json.dumps(about)
    status, out, err = start("text", "out/b.safetensors", script=export)
    assert (status, out) == (1, []) and "no checkpoint" in err[0]


def test_tensorboards_files_are_written_where_asked_and_its_lack_is_one_message(start, text, monkeypatch):
    plan = [*SMALL, "run.tensorboard=true", "train.steps=1"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorboard", None)
        status, out, err = start(*plan, "run.dir=a")
        assert (status, out, len(err)) == (1, [], 1) and 'pip install "tpattn[tb]"' in err[0]
        assert not (text / "a").exists()
    pytest.importorskip("tensorboard", reason='needs the extra tb: pip install "tpattn[tb]"')
    assert start(*plan, "run.dir=a")[0] == 0
    assert [p.name for p in (text / "a" / "tensorboard").iterdir() if p.name.startswith("events")]


def test_mistakes_are_one_message(start, text):
    """A text too short, a checkpoint of another model, a broken one, a run's folder that is taken: status 1, no traceback."""
    start(*SMALL, "run.dir=a", "train.steps=1")
    for argv, told in (
        (["train.seq_len=100000"], "too few for one sample of seq_len=100000"),
        (["run.dir=a", "model.hidden=64"], "checkpoints/step_000001: of another model: embedding.weight is"),
        (["run.dir=a", "train.resume=false"], "run.dir="),
        (["train.resume=text"], "no checkpoint: it has no manifest.json"),
        (["parallel.tp=2"], "start 2 processes: torchrun"),
        (["model.num_heads=5"], "model.num_kv_heads=4 does not divide model.num_heads=5"),
    ):
        status, out, err = start(*SMALL, *argv)
        assert (status, out) == (1, []), argv
        assert len(err) == 1 and err[0].startswith("error: ") and told in err[0], err
    assert not (text / "runs").exists()


def test_a_loss_that_is_no_number_is_one_message(start, text):
    status, out, err = start(*SMALL, "optim.lr=1e38", "optim.warmup_steps=0", "run.dir=a", "train.steps=9")
    assert status == 1
    assert len(err) == 1 and re.match(r"error: step \d of 9: the loss is (nan|inf)", err[0]), err
    assert all(loss < 1e30 for _, loss, _ in losses("a"))


def test_compare_prints_both_columns_and_their_difference(start, text):
    start(*SMALL, "run.dir=a", "train.steps=6")
    status, out, err = start("a", "--steps", "4", script=compare)
    assert (status, err) == (0, [])
    assert out[0].split() == ["step", "loss,", "1", "rank", "loss,", "1", "process"]
    rows = [[float(word) for word in line.split()] for line in out[1:5]]
    assert [(row[0], row[1]) for row in rows] == [(step, round(loss, 9)) for step, loss, _ in losses("a")[:4]]
    assert out[5] == "largest difference 0.0e+00, 0.0e+00 of the loss: rounding"
    entries = read_metrics("a")
    entries[2]["loss"] += 0.01
    (text / "a" / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    status, out, err = start("a", script=compare)
    assert status == 1
    assert re.fullmatch(r"largest difference 1\.0e-02, .* of the loss: MORE than rounding \(0\.0001\)", out[-1])


def test_compare_says_what_it_needs(start, text):
    start(*SMALL, "run.dir=a", "train.steps=2")
    (text / "a" / "metrics.jsonl").write_text("")
    for folder, told in (("a", "lacks losses of the first 5 steps"), ("b", "b/config.yaml: cannot read the file")):
        status, _, err = start(folder, script=compare)
        assert status == 1
        assert len(err) == 1 and told in err[0]


# ----------------------------------------------------------------------------------------------------------- under torchrun

SCRIPT = """
import os, runpy, sys, time
sys.path.insert(0, sys.argv.pop(1))
what, rank = sys.argv.pop(1), int(os.environ["RANK"])
if what == "late":
    time.sleep(1.5 * rank)

def failing(function, time_to_fail):
    calls = [0]
    def wrapped(*args, **kwargs):
        calls[0] += 1
        if rank == 1 and calls[0] == time_to_fail:
            print("raised at", time.time(), flush=True)
            raise ValueError(f"injected in rank 1's {what}")
        return function(*args, **kwargs)
    return wrapped

if what == "data":
    from tpattn.data import Batches
    Batches.share = failing(Batches.share, 3)
if what == "forward":
    from tpattn.model import Transformer
    Transformer.forward = failing(Transformer.forward, 2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def launch(ranks, script, *argv, env=()):
    """torchrun with this many ranks; without PYTHONPATH, as on a user's machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *script, *argv]
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK")}
    return subprocess.run(
        command, env={**kept, "OMP_NUM_THREADS": "1", **dict(env)}, capture_output=True, text=True, timeout=110, check=False
    )


def wrapped(folder, what):
    (folder / "script.py").write_text(SCRIPT)
    return [str(folder / "script.py"), str(ROOT), what, str(ROOT / "scripts" / "train.py")]


def test_c56_c57_one_run_folder_though_ranks_come_late_relative_paths_and_chdir(start, text):
    """Two ranks under torchrun, from another folder, rank 1 comes later: one folder, nothing to ignore, one process's losses."""
    done = launch(2, wrapped(text, "late"), *SMALL, "parallel=cp2", "parallel.sequence_parallel=true", "hydra.job.chdir=true")
    assert (done.returncode, done.stderr) == (0, "")
    runs = list((text / "runs").iterdir())
    assert len(runs) == 1
    files = ["checkpoints", "config.yaml", "loss.png", "metrics.csv", "metrics.jsonl"]
    assert sorted(p.name for p in runs[0].iterdir()) == [".launch", *files]
    lines = done.stdout.splitlines()
    assert [line.split("   loss")[0] for line in lines if line.startswith("step")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert [line.split()[0] for line in lines[-7:]] == ["total", "loss", "cost", "picture", "compare", "write", "next"]
    assert start(*SMALL, "run.dir=one")[0] == 0
    for (step, loss, norm), (same, want, want_norm) in zip(losses(runs[0]), losses("one"), strict=True):
        assert step == same
        assert abs(loss - want) < 1e-5 * want
        assert abs(norm - want_norm) < 1e-4 * want_norm


@pytest.mark.long
@pytest.mark.parametrize("what", ["data", "forward"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_c45_one_ranks_error_ends_the_job_and_is_the_one_that_is_shown(text, ranks, what):
    """C45: a ValueError in rank 1's data, or in its forward, while the others are in a collective."""
    parallel = "parallel=tp2" if ranks == 2 else "parallel=tp2_cp2"
    done = launch(ranks, wrapped(text, what), *SMALL, parallel)
    raised = float(re.search(r"raised at ([\d.]+)", done.stdout)[1])
    assert time.time() - raised < 20
    assert done.returncode != 0
    assert f"ValueError: injected in rank 1's {what}" in done.stderr
    assert "Traceback" in done.stderr and "in main" in done.stderr
    assert "PeerLost" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["parallel.tp=3", "parallel.cp=2"], ["dp=-1 x cp=2 x tp=3", "product 6", "4 processes"]),
        (["parallel.tp=2", "parallel.cp=1", "parallel.dp=1"], ["dp=1 x cp=1 x tp=2", "product 2", "4 processes"]),
        (["parallel.tp=0"], ["tp=0", "sizes that work"]),
        (["parallel.tp=-1", "parallel.dp=-1"], ["only one of dp, cp, tp may be -1"]),
        (["parallel.tp=two"], ["parallel.tp='two'", "needed: a whole number"]),
    ],
)
def test_c53_sizes_that_do_not_fit_are_one_message(text, argv, told):
    """C53 through the script: on four ranks, before any group is made, once."""
    begin = time.time()
    done = launch(4, [str(ROOT / "scripts" / "train.py")], *SMALL, *argv)
    assert done.returncode != 0
    assert time.time() - begin < 60
    messages = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1
    assert all(word in messages[0] for word in told), messages
    assert not (text / "runs").exists()


@pytest.mark.long
def test_c55_launcher_flags_and_numbers_as_text(text):
    """C55 through the script: --local_rank is answered in the user's words; '2' is 2."""
    done = launch(2, [str(ROOT / "scripts" / "train.py")], "--local_rank=0", *SMALL)
    assert done.returncode != 0
    assert done.stderr.count("error: --local_rank=0: a launcher's flag, not an option of this script") == 1
    done = launch(2, [str(ROOT / "scripts" / "train.py")], *SMALL, "parallel.tp='2'", "train.steps=1")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_c57_the_module_form_and_a_resumed_run_under_torchrun(text, monkeypatch):
    """python -m scripts.train from the repository; a run of four ranks stops, goes on, and equals one that did not."""
    monkeypatch.chdir(ROOT)
    plan = [*SMALL[:2], f"data.path={text / 'text'}", "parallel=tp2_cp2", "train.steps=5"]
    for folder, *more in (["whole"], ["parts", "train.stop_at=2"], ["parts"]):
        done = launch(4, ["-m", "scripts.train"], *plan, f"run.dir={text / folder}", *more)
        assert (done.returncode, done.stderr) == (0, "")
    assert losses(text / "parts") == losses(text / "whole")
    assert len(losses(text / "whole")) == 5
