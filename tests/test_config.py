"""Command lines and config files: what they mean, and one short message for each mistake."""

import dataclasses
import re
from pathlib import Path

import pytest

from tpattn.config import Config, ConfigError, build, dump, load
from tpattn.config.convert import groups, hints

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
        ("attention.layout=ring", "one of auto, contiguous, zigzag, striped, balanced"),
        ("attention.transport=null", "one of auto, exchange, rotate"),
        ("model.activation=swish", "one of gelu, relu, silu, swiglu"),
        ("train.resume=true", "auto, false or a checkpoint's path"),
        ("train.resume=null", "auto, false or a checkpoint's path"),
        ("data.valid=some", "auto or a share from 0 up, below 1"),
        ("data.valid=null", "auto or a share from 0 up, below 1"),
        ("data.tokenizer=null", "auto, bytes or the path of a tokenizer.json"),
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
        ("data.valid=0", 0.0),
        ("data.valid=0.1", 0.1),
        ("data.valid=auto", "auto"),
        ("data.tokenizer=bytes", "bytes"),
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
        (["data.tokenizer=nowhere.json"], "nowhere.json: no such file; needed: auto, bytes or the path of a tokenizer.json"),
        (["data.tokenizer="], "data.tokenizer=: no such file; needed: auto, bytes"),
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
        (["model.vocab_size=0"], "1 or more, or null"),
        (["model.vocab_size=100", "data.tokenizer=bytes"], "257 ids"),
        (["data.valid=1"], "a share from 0 up, below 1"),
        (["data.valid=-0.1"], "a share from 0 up, below 1"),
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
