"""The paths and the one folder of a run, and its one message. The last test runs torchrun."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpattn.config import ConfigError, load, make_run_dir, one_message
from tpattn.errors import TpattnError

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"


def test_c57_relative_paths_count_from_where_the_user_started(tmp_path, monkeypatch):
    """C57: the same files from any folder, and with hydra.job.chdir=true."""
    (tmp_path / "my text, (1)=a.txt").write_text("hello")
    (tmp_path / "old").mkdir()
    (tmp_path / "tok.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    argv = ["data.path=my text, (1)=a.txt", "run.dir=out/here", "train.resume=old", "data.tokenizer=tok.json"]
    for more in ([], ["hydra.job.chdir=true"]):
        cfg = load([*argv, *more], os.path.relpath(CONFIGS))
        assert cfg.data.path == str(tmp_path / "my text, (1)=a.txt")
        assert cfg.data.tokenizer == str(tmp_path / "tok.json")
        assert cfg.run.dir == str(tmp_path / "out" / "here")
        assert cfg.train.resume == str(tmp_path / "old")
        assert cfg.run.chdir is bool(more)
        assert Path.cwd() == tmp_path
        folder = make_run_dir(cfg, 0, lambda text: text)
        assert folder == tmp_path / "out" / "here"
        assert Path.cwd() == (folder if more else tmp_path)
        assert Path(cfg.data.path).read_text() == "hello"
    monkeypatch.chdir(tmp_path)
    cfg = load(["hydra.job.chdir=true"], CONFIGS)
    assert make_run_dir(cfg, 0, lambda text: text).parent == tmp_path / "runs" == Path.cwd().parent
    assert load(["data.path='old'"], CONFIGS, start_dir=tmp_path).data.path == str(tmp_path / "old")


def run_dirs(env: dict[str, str], start: Path, *argv: str, ranks: int = 4) -> Path:
    """The folder of a run, agreed by `ranks` ranks which come one after the other, rank 0 first."""
    said: list[str] = []

    def broadcast(text: str) -> str:
        said.append(text)
        return said[0]

    loaded = load(argv, CONFIGS, start_dir=start)
    cfgs = [copy.deepcopy(loaded) for _ in range(ranks)]
    folders = {make_run_dir(cfg, rank, broadcast, start_dir=start, env=env) for rank, cfg in enumerate(cfgs)}
    assert len(folders) == 1
    folder = folders.pop()
    assert folder.is_dir()
    assert all(cfg.run.dir == str(folder) for cfg in cfgs)
    return folder


def launch_env(run_id: str, restarts: int = 0) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restarts)}


@pytest.mark.parametrize("run_id", ["6d1c7b1e-0d4f", "none", None])
def test_c56_one_folder_per_run_and_no_two_runs_share_one(tmp_path, monkeypatch, run_id):
    """C56, without processes: with torchrun's own id, with its default id, and without torchrun."""
    env = {} if run_id is None else launch_env(run_id)
    folders = []
    for agent in (101, 102, 103):
        monkeypatch.setattr(os, "getppid", lambda agent=agent: agent)
        folders.append(run_dirs(env, tmp_path))
    assert len(set(folders)) == 3
    assert sorted((tmp_path / "runs").iterdir()) == sorted(folders)
    if run_id == "6d1c7b1e-0d4f":
        assert [folder.name for folder in folders] == [run_id, f"{run_id}-2", f"{run_id}-3"]
    else:
        assert all(re.match(r"\d{8}-\d{6}", folder.name) for folder in folders)


@pytest.mark.parametrize("run_id", ["job 7/a", "none"])
def test_a_run_that_torchrun_restarts_finds_its_own_folder(tmp_path, monkeypatch, run_id):
    monkeypatch.setattr(os, "getppid", lambda: 101)
    mine = run_dirs(launch_env(run_id), tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 102)
    other = run_dirs(launch_env(run_id), tmp_path)
    assert other != mine
    for agent, folder in ((101, mine), (102, other)):
        monkeypatch.setattr(os, "getppid", lambda agent=agent: agent)
        assert run_dirs(launch_env(run_id, restarts=1), tmp_path) == folder
        assert run_dirs(launch_env(run_id, restarts=2), tmp_path) == folder
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_restart_on_another_machine_finds_the_folder_by_the_run_id(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 101)
    mine = run_dirs(launch_env("job7"), tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 999)
    assert run_dirs(launch_env("job7", restarts=1), tmp_path) == mine


def test_a_folder_with_another_run_is_continued_or_refused(tmp_path):
    assert run_dirs({}, tmp_path, "run.dir=out", "train.resume=false") == tmp_path / "out"
    (tmp_path / "out" / "metrics.jsonl").write_text("{}\n")
    assert run_dirs({}, tmp_path, "run.dir=out") == tmp_path / "out"
    with pytest.raises(ConfigError, match="files of another run; train.resume=auto would continue it"):
        run_dirs({}, tmp_path, "run.dir=out", "train.resume=false")
    assert run_dirs(launch_env("x", restarts=1), tmp_path, "run.dir=out", "train.resume=false") == tmp_path / "out"
    (tmp_path / "out" / "step5").mkdir()
    assert run_dirs({}, tmp_path, "run.dir=out", "train.resume=out/step5") == tmp_path / "out"


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    said: list[str] = []
    for rank in range(3):
        cfg = load(["run.dir=file/run"], CONFIGS, start_dir=tmp_path)

        def broadcast(text: str) -> str:
            said.append(text)
            return said[0]

        with pytest.raises(ConfigError, match="cannot make the run's folder"):
            make_run_dir(cfg, rank, broadcast, start_dir=tmp_path, env={})


# ------------------------------------------------------------------------------------------------------------------ one message


@pytest.mark.parametrize("rank", [None, "0", "2"])
def test_a_mistake_is_printed_by_one_rank_and_every_rank_leaves_with_1(capsys, rank):
    with pytest.raises(SystemExit) as leave, one_message({} if rank is None else {"RANK": rank}):
        load(["parallel.tpp=2"], CONFIGS)
    assert leave.value.code == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch("" if rank == "2" else r"error: parallel\.tpp: no such key\. Did you mean parallel\.tp\? .*\n", said.err)


def test_errors_that_are_no_mistake_of_the_user_keep_their_traceback():
    class Lost(TpattnError, RuntimeError):
        pass

    for kind in (Lost, ValueError, ZeroDivisionError):
        with pytest.raises(kind), one_message({}):
            raise kind("inside")


# ------------------------------------------------------------------------------------------------------------- real processes

SCRIPT = """
import os, sys, time
from pathlib import Path
from tpattn.config import load, make_run_dir, one_message

configs, rank, attempt = sys.argv[1], int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
told = Path(f"told-{attempt}")

def broadcast(text):
    if rank == 0:
        Path("tmp").write_text(text)
        Path("tmp").rename(told)
    while not told.exists():
        time.sleep(0.02)
    return told.read_text()

time.sleep(1.0 * rank)
folder = make_run_dir(load([], configs), rank, broadcast)
Path(f"seen-{attempt}-{rank}").write_text(str(folder))
if attempt == 0:
    while len(list(Path().glob("seen-0-*"))) < 2:
        time.sleep(0.02)
    sys.exit(3 if rank == 1 else 0)
while len(list(Path().glob("seen-1-*"))) < 2:
    time.sleep(0.02)
time.sleep(1.0 - rank)
with one_message():
    load(["parallel.tpp=2"], configs)
"""


@pytest.mark.long
def test_c55_c56_torchrun_with_delayed_ranks_makes_one_folder_finds_it_after_a_restart_and_prints_a_mistake_once(tmp_path):
    """The real thing: rank 1 starts late and fails once; after the restart, rank 0 is the later one to see the mistake."""
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "script.py", str(CONFIGS)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    seen = {path.name: path.read_text() for path in tmp_path.glob("seen-*")}
    assert sorted(seen) == ["seen-0-0", "seen-0-1", "seen-1-0", "seen-1-1"], done.stderr
    assert [str(folder) for folder in (tmp_path / "runs").iterdir()] == sorted(set(seen.values()))
    assert done.returncode != 0
    assert done.stderr.count("error: parallel.tpp: no such key. Did you mean parallel.tp?") == 1
    assert "ConfigError" not in done.stderr
