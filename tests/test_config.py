"""Command lines and config files: what they mean, and one short message for each mistake. The last test runs torchrun."""

import copy
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tpattn
from tpattn.config import Config, ConfigError, ModelConfig, build, dump, load, make_run_dir, one_message
from tpattn.config.build import NAMES
from tpattn.config.convert import groups, hints
from tpattn.errors import TpattnError, Unsupported
from tpattn.layout import AttentionGrid

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
GROUPS = sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir())
OPTIONS = sorted(f"{file.parent.name}={file.stem}" for file in CONFIGS.glob("*/*.yaml"))
FILES = sorted(str(file.relative_to(CONFIGS)) for file in CONFIGS.rglob("*.yaml"))


def mistake(*argv: str, config_dir: Path = CONFIGS) -> str:
    """The message of `argv`, which must be short and in one line."""
    with pytest.raises(ConfigError) as error:
        load(argv, config_dir)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


# ------------------------------------------------------------------------------------------------------------------ the files


@pytest.mark.parametrize("option", OPTIONS)
def test_every_config_file_composes_and_sets_every_key_of_its_group(option):
    group, name = option.split("=")
    more = {"data": ["data.path=train.yaml"], "attention": ["parallel=cp4"]}.get(group, [])
    load([option, *more], CONFIGS, start_dir=CONFIGS)
    text = (CONFIGS / group / f"{name}.yaml").read_text()
    for field in dataclasses.fields(groups()[group]) if group in groups() else ():
        assert re.search(rf"^{field.name}: ", text, re.M), f"{option} does not set {field.name}"


@pytest.mark.parametrize("file", FILES)
def test_every_config_file_starts_with_its_command_and_every_key_has_its_meaning_beside_it(file):
    lines = (CONFIGS / file).read_text().splitlines()
    head = [line for line in lines if line.startswith("#")][:3]
    assert any(f"configs/{file} -- " in line for line in head)
    assert any("scripts/train.py" in line for line in head)
    for line in lines:
        assert len(line) <= 140
        if line.strip() and not line.startswith("#") and not re.fullmatch(r"\w+:|  - _self_", line):
            assert re.search(r"\S +# \w", line), f"{file}: no meaning beside {line!r}"


def test_commands_in_the_files_load():
    """The command that a file starts with is one that works."""
    for file in FILES:
        for line in (CONFIGS / file).read_text().splitlines():
            if line.startswith("#") and "scripts/train.py" in line:
                argv = line.split("scripts/train.py")[1].split()
                load([word.replace("my.txt", "train.yaml") for word in argv if "GROUP" not in word], CONFIGS, start_dir=CONFIGS)


def test_schema_defaults_are_those_of_the_default_files():
    """One value per key, whichever way a Config is made; the model group's default file is the quickstart's model."""
    loaded, plain = load([], CONFIGS), Config()
    for group in groups():
        if group != "model":
            assert getattr(loaded, group) == getattr(plain, group)


def test_quickstart_is_hybrid_and_large_enough():
    cfg = load(["experiment=quickstart"], CONFIGS)
    assert (cfg.parallel.dp, cfg.parallel.cp, cfg.parallel.tp, cfg.parallel.sequence_parallel) == (1, 2, 2, True)
    assert cfg.train.steps >= 60
    m = cfg.model
    head_dim = m.head_dim or m.hidden // m.num_heads
    attention = m.hidden * head_dim * 2 * (m.num_heads + (m.num_kv_heads or m.num_heads))
    assert m.num_layers >= 2
    assert m.num_layers * (attention + 3 * m.hidden * (m.ffn or 0)) > 1_000_000


def test_command_line_wins_over_experiment_wins_over_group_file():
    cfg = load(["experiment=quickstart", "train.steps=61", "parallel=dp4"], CONFIGS)
    assert (cfg.train.steps, cfg.train.log_every, cfg.parallel.dp) == (61, 10, 4)
    assert load(["train.steps=7", "train.steps=8", "parallel=tp2", "parallel=cp2"], CONFIGS).train.steps == 8
    assert load(["experiment=null"], CONFIGS) == load([], CONFIGS)


# ------------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("key", list(hints()))
def test_a_misspelt_key_is_named_in_full_with_the_closest_and_the_legal_ones(key):
    group, name = key.split(".")
    misspelt = f"{group}.{name[:-1] + name[-1] * 2}"
    message = mistake(f"{misspelt}=1")
    assert message.startswith(f"{misspelt}: no such key. Did you mean {key}?")
    for field in dataclasses.fields(groups()[group]):
        assert field.name in message.split("Keys of")[1]


@pytest.mark.parametrize("group", GROUPS)
def test_a_misspelt_option_is_named_with_the_closest_and_the_legal_ones(group):
    options = sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))
    message = mistake(f"{group}={options[-1]}x")
    assert message.startswith(f"{group}={options[-1]}x: no such option. Did you mean {group}={options[-1]}?")
    assert f"Options: {', '.join(options)}" in message


def test_c55_typing_errors_and_launcher_flags():
    """C55: each ends in one short message with the bad key and the legal ones; tp as the text '2' is 2."""
    assert mistake("parallel.tpp=2") == (
        "parallel.tpp: no such key. Did you mean parallel.tp? Keys of parallel: dp, cp, tp, sequence_parallel, timeout"
    )
    message = mistake("attention=rinng")
    assert message.startswith("attention=rinng: no such option. Did you mean attention=ring? Options: auto, ring, ulysses, usp")
    for flag in ("--local_rank=0", "--local-rank=0", "--nproc-per-node", "--standalone", "--rdzv-backend=c10d", "--nnodes"):
        message = mistake("parallel=tp2", flag, "4")
        assert flag in message
        assert "torchrun" in message
        assert "GROUP.KEY=VALUE" in message
    for text in ("parallel.tp='2'", 'parallel.tp="2"', "parallel.tp=2", "+parallel.tp=2", "++parallel.tp=2"):
        assert load([text], CONFIGS).parallel.tp == 2


@pytest.mark.parametrize(
    ("word", "guess"),
    [
        ("paralel.tp=2", "parallel.tp"),
        ("parallel.steps=5", "train.steps"),
        ("tp=2", "parallel.tp"),
        ("paralel=tp2", "parallel"),
        ("--tp=2", "parallel.tp=2"),
        ("--parallel.tp=2", "parallel.tp=2"),
        ("--hlp", "--help"),
        ("attention.layout=zigzg", "zigzag"),
        ("attention.ring=atuo", "auto"),
        ("train.dtype=float23", "float32"),
    ],
)
def test_the_closest_match_is_offered(word, guess):
    message = mistake(word)
    assert f"Did you mean {guess}?" in message
    assert word.split("=")[0] in message


@pytest.mark.parametrize(
    ("word", "need"),
    [
        ("parallel.tp=two", "a whole number"),
        ("parallel.tp=2.0", "a whole number"),
        ("parallel.tp=", "a whole number"),
        ("parallel.tp=true", "a whole number"),
        ("parallel.tp=null", "a whole number"),
        ("train.steps=1e3", "a whole number"),
        ("attention.ring=2.5", "a whole number or auto"),
        ("optim.lr=fast", "a number"),
        ("optim.lr=nan", "a number"),
        ("optim.clip=inf", "a number or null"),
        ("optim.betas=0.9", "a list of 2 numbers"),
        ("optim.betas=[0.9]", "a list of 2 numbers"),
        ("optim.betas=[0.9", "a list of 2 numbers"),
        ("parallel.sequence_parallel=1", "true or false"),
        ("parallel.sequence_parallel=yes", "true or false"),
        ("attention.layout=ring", "one of auto, contiguous, zigzag, striped"),
        ("attention.transport=null", "one of auto, exchange, rotate"),
        ("model.activation=swish", "one of gelu, relu, silu, swiglu"),
        ("train.resume=true", "auto, false or a checkpoint's path"),
        ("train.resume=null", "auto, false or a checkpoint's path"),
        ("hydra.job.chdir=maybe", "true or false"),
    ],
)
def test_a_wrong_type_is_refused_with_value_key_and_need(word, need):
    key, value = word.split("=")
    message = mistake(word)
    assert message.startswith(f"{key}=")
    assert f"needed: {need}" in message
    assert value.rstrip("0").lower()[:3] in message or value == "1e3"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("parallel.sequence_parallel=true", True),
        ("parallel.sequence_parallel='False'", False),
        ("optim.lr=1", 1.0),
        ("optim.lr=3e-4", 3e-4),
        ("optim.lr='3e-4'", 3e-4),
        ("optim.clip=null", None),
        ("optim.betas=[0,0.5]", (0.0, 0.5)),
        ("attention.ring=auto", "auto"),
        ("train.resume=false", False),
        ("train.stop_at=${train.steps}", 100),
        ("model.num_kv_heads=8", 8),
    ],
)
def test_values_arrive_in_their_type(word, value):
    group, name = word.split("=")[0].split(".")
    got = getattr(getattr(load([word], CONFIGS), group), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["parallel"], "write parallel=VALUE"),
        (["parallel.tp", "2"], "write parallel.tp=VALUE"),
        (["nonsense"], "not understood"),
        (["~parallel.tp"], "not understood"),
        (["parallel.tp=1,2"], "several values"),
        (["parallel={tp:2}"], "single keys are set by parallel.KEY=VALUE"),
        (["run=here"], "no such group"),
        (["hydra.run.dir=x"], "the run's folder is run.dir"),
        (["hydra.sweep.dir=x"], "only hydra.job.chdir"),
        (["data=text"], "data.path: needs a value"),
        (["data.path=nowhere.txt"], "nowhere.txt: no such file or folder"),
        (["data.path=${nowhere}"], "data.path: "),
        (["train.resume=nowhere"], "nowhere: no such file or folder"),
    ],
)
def test_what_cannot_be_understood_is_refused(argv, words):
    assert words in mistake(*argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["parallel.timeout=0"], "more than 0 seconds"),
        (["attention.ulysses=2"], "attention.ulysses=2 attention.ring=1 attention.merge=1"),
        (
            ["attention=usp", "parallel=cp2", "attention.ring=2"],
            "4 is not parallel.cp=2; parallel.cp=4 or attention=auto would work",
        ),
        (["attention=usp", "parallel.cp=3"], "a multiple of 2 is not parallel.cp=3"),
        (["attention=usp"], "a multiple of 2 is not parallel.cp=1"),
        (["attention=ring", "attention.merge=-1", "parallel=cp4"], "one may be -1"),
        (["attention=ring", "attention.merge=0", "parallel=cp4"], "from 1 up"),
        (["model.num_kv_heads=3"], "model.num_kv_heads=3 does not divide model.num_heads=8; 1, 2, 4, 8 would work"),
        (["model.num_heads=6", "model.num_kv_heads=3"], "model.hidden=258 would work, or give model.head_dim"),
        (["model.head_dim=5"], "need an even number; 6 would work"),
        (["model.num_layers=0"], "model.num_layers=0: needed: 1 or more"),
        (["model.vocab_size=100"], "257 ids"),
        (["model.rope_base=0"], "more than 0"),
        (["optim.lr=0"], "more than 0"),
        (["optim.betas=[0.9,1]"], "below 1"),
        (["optim.eps=0"], "more than 0"),
        (["optim.weight_decay=-0.1"], "0 or more"),
        (["optim.warmup_steps=-1"], "0 or more"),
        (["optim.min_lr_fraction=2"], "a fraction"),
        (["optim.clip=0"], "null for no clipping"),
        (["train.seq_len=0"], "1 or more"),
        (["train.batch_size=0"], "1 or more"),
        (["train.batch_size=3", "parallel=dp4"], "train.batch_size=4 or more would work"),
        (["train.checkpoint_every=-1"], "0 for one at the end"),
        (["train.stop_at=101"], "1 to train.steps=100"),
        (["train.seed=-1"], "0 to 2^63 - 1"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused_with_numbers_and_remedy(argv, words):
    assert words in mistake(*argv)


def test_grids_that_fit_are_accepted():
    for argv in (["attention=usp", "parallel=cp2"], ["attention=usp", "parallel=cp4"], ["attention=ring"], ["attention=ulysses"]):
        load(argv, CONFIGS)
    assert load(["attention=usp", "parallel.cp=-1", "parallel.dp=1"], CONFIGS).attention.ulysses == 2  # cp is not known yet


def test_no_config_calls_a_python_object(tmp_path):
    place = tmp_path / "made"
    for argv in (["model._target_=os.mkdir"], ["+model._target_=os.mkdir"], ["train.steps={_target_:os.mkdir}"]):
        assert "_target_" in mistake(*argv)
    write_configs(tmp_path, f"model:\n  _target_: os.mkdir\n  path: {place}\n")
    assert "model._target_: no config of tpattn names Python objects" in mistake(config_dir=tmp_path)
    with pytest.raises(ConfigError, match="_target_ is not used"):
        build({"name": "RMSNorm", "hidden": {"_target_": "os.mkdir", "path": str(place)}}, None)
    assert not place.exists()


def write_configs(folder: Path, train: str) -> None:
    (folder / "train.yaml").write_text(train)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("parallel: {tpp: 2}", "parallel.tpp: no such key. Did you mean parallel.tp?"),
        ("paralel: {tp: 2}", "paralel: no such key"),
        ("parallel: 2", "parallel=2: needed: the keys dp, cp, tp"),
        ("parallel: {tp: [2}", "do not fit together"),
        ("parallel:\n  tp: 1\n  tp: 2\n", "duplicate key"),
        ("defaults: [{parallel: tp2}]", "parallel/tp2"),
        ("train: {stop_at: '${train.step}'}", "train.stop_at: Interpolation key 'train.step' not found"),
    ],
)
def test_mistakes_in_files_get_the_same_messages(tmp_path, train, words):
    write_configs(tmp_path, train)
    assert words in mistake(config_dir=tmp_path)


def test_a_folder_without_configs_is_refused(tmp_path):
    assert "no file train.yaml" in mistake(config_dir=tmp_path)


def test_hydra_is_left_as_it_was():
    from hydra.core.global_hydra import GlobalHydra

    load([], CONFIGS)
    mistake("parallel.tpp=2")
    assert not GlobalHydra.instance().is_initialized()


# --------------------------------------------------------------------------------------------------------------- help and dump


def test_help_lists_groups_options_and_every_key_with_its_meaning_on_one_rank_only(capsys, monkeypatch):
    with pytest.raises(SystemExit) as leave:
        load(["--help", "parallel=tp2_cp2"], CONFIGS)
    assert leave.value.code == 0
    text = capsys.readouterr().out
    for group in GROUPS:
        for file in (CONFIGS / group).glob("*.yaml"):
            assert re.search(rf"^  {group} .*\b{file.stem}\b", text, re.M)
    for key in hints():
        assert re.search(rf"^  {re.escape(key)}=\S+.* +\w+ .*\(.+\)$", text, re.M), key
    assert "parallel.tp=2 " in text
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        load(["--help"], CONFIGS)
    assert capsys.readouterr().out == ""


def test_cfg_prints_what_dump_writes_and_loads_again(capsys, tmp_path):
    argv = ["experiment=quickstart", "optim.eps=1e-9", "optim.clip=null", f"data.path={tmp_path}"]
    with pytest.raises(SystemExit):
        load(["--cfg", *argv], CONFIGS)
    text = capsys.readouterr().out
    cfg = load(argv, CONFIGS)
    assert text == dump(cfg)
    write_configs(tmp_path, text)
    assert load([], tmp_path) == cfg


# ---------------------------------------------------------------------------------------------------------- paths and folders


def test_c57_relative_paths_count_from_where_the_user_started(tmp_path, monkeypatch):
    """C57: the same files from any folder, and with hydra.job.chdir=true."""
    (tmp_path / "my text, (1)=a.txt").write_text("hello")
    (tmp_path / "old").mkdir()
    monkeypatch.chdir(tmp_path)
    argv = ["data.path=my text, (1)=a.txt", "run.dir=out/here", "train.resume=old"]
    for more in ([], ["hydra.job.chdir=true"]):
        cfg = load([*argv, *more], os.path.relpath(CONFIGS))
        assert cfg.data.path == str(tmp_path / "my text, (1)=a.txt")
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
    assert said.err == ("" if rank == "2" else f"error: {mistake('parallel.tpp=2')}\n")


def test_errors_that_are_no_mistake_of_the_user_keep_their_traceback():
    class Lost(TpattnError, RuntimeError):
        pass

    for kind in (Lost, ValueError, ZeroDivisionError):
        with pytest.raises(kind), one_message({}):
            raise kind("inside")


# ----------------------------------------------------------------------------------------------------------------------- build


class Layer(torch.nn.Module):
    """A stand-in with the look of a layer's constructor."""

    def __init__(self, in_features, out_features, *, ctx, bias=True, dtype=None, grid="auto"):
        super().__init__()
        self.got = (in_features, out_features, ctx, bias, dtype, grid)


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(tpattn, "ColumnParallelLinear", Layer, raising=False)


def test_build_gives_a_layer_ordinary_values(stand_in):
    from omegaconf import OmegaConf

    plain = {"name": "ColumnParallelLinear", "in_features": 4, "out_features": 6, "dtype": "float64"}
    plain["grid"] = {"ulysses": 2, "ring": 3}
    for cfg in (plain, OmegaConf.create(plain)):
        assert build(cfg, "ctx").got == (4, 6, "ctx", True, torch.float64, AttentionGrid(ulysses=2, ring=3))
    assert plain["name"] == "ColumnParallelLinear"  # untouched


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({"name": "ColumnParalelLinear"}, "no such layer. Did you mean ColumnParallelLinear? Names: Column"),
        ({"name": "columnparallellinear"}, "Did you mean ColumnParallelLinear?"),
        ({"name": "os.mkdir"}, "no such layer"),
        ({"name": None}, "no such layer"),
        (
            {"name": "ColumnParallelLinear", "in_feature": 4, "out_features": 6},
            "no argument 'in_feature'. Did you mean in_features?",
        ),
        ({"name": "ColumnParallelLinear", "in_features": 4}, "needs out_features; given: in_features"),
        ({"name": "ColumnParallelLinear", "in_features": 4, "out_features": 6, "ctx": 1}, "no argument 'ctx'"),
        ({"name": "ColumnParallelLinear", "in_features": 4, "out_features": 6, "dtype": "float23"}, "no such number format"),
        ({"name": "ColumnParallelLinear", "in_features": 4, "out_features": 6, "grid": {"rinng": 2}}, "no leg 'rinng'"),
        (3, "needed: a mapping"),
    ],
)
def test_build_refuses_unknown_names_and_arguments(stand_in, cfg, words):
    with pytest.raises(ConfigError) as error:
        build(cfg, None)
    assert words in str(error.value)


def test_build_of_a_run_refuses_what_the_model_cannot_honour(monkeypatch):
    class Model(torch.nn.Module):
        def __init__(self, vocab_size, hidden, num_layers, num_heads, num_kv_heads=None, head_dim=None, ffn=None, activation="",
                     norm="", tied=False, rope_base=1.0, seed=None, *, ctx, grid="auto"):  # fmt: skip
            super().__init__()
            self.got = (vocab_size, hidden, seed, grid)

    monkeypatch.setattr(tpattn, "Transformer", Model, raising=False)
    cfg = load(["model=tiny", "train.seed=5"], CONFIGS)
    assert build(cfg, None).got == (257, 48, 5, "auto")
    assert build(cfg.model, None).got == (257, 48, None, "auto")
    for word in ("attention.transport=rotate", "train.dtype=bfloat16", "parallel.sequence_parallel=true"):
        with pytest.raises(Unsupported, match=word.split("=")[0]):
            build(load([word], CONFIGS), None)
    assert build(load(["attention=usp", "parallel=cp4"], CONFIGS), None).got[3] == AttentionGrid(ulysses=2, ring=-1)


@pytest.mark.skipif(not all(hasattr(tpattn, name) for name in NAMES), reason="the layers are being written")
def test_the_model_group_is_what_transformer_takes():
    import inspect

    arguments = inspect.signature(tpattn.Transformer).parameters
    assert {field.name for field in dataclasses.fields(ModelConfig)} <= set(arguments)
    assert set(arguments) >= {"seed", "dtype", "grid", "sequence_parallel", "ctx"}
    with tpattn.ParallelContext.single() as ctx:
        for model in ("tiny", "small"):
            made = build(load([f"model={model}"], CONFIGS), ctx)
            assert isinstance(made, tpattn.Transformer)
            assert sum(p.numel() for p in made.parameters()) > (1_000_000 if model == "small" else 10_000)


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
