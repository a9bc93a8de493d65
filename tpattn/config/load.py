"""A command line and a folder of YAML -> one checked `Config`.

Hydra composes the chosen group files through its compose API (not @hydra.main: run folder, logging and messages are ours).
Single values are applied here, after the files, because their keys are known: so a text keeps every character, and a
mistake gets our message. What a person may type: --help, --cfg, group=option, group.key=value.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tpattn.config import convert
from tpattn.config.check import check
from tpattn.config.schema import Config, ConfigError, dump

_LAUNCHER = re.compile(
    r"--(local[-_]rank|nproc[-_]per[-_]node|nnodes|node[-_]rank|standalone|rdzv|master|max[-_]restarts|monitor)"
)
_FLAGS = ("--help", "-h", "--cfg")
_LEGAL = "legal here: --help, --cfg, GROUP=OPTION and GROUP.KEY=VALUE"
_EXAMPLE = "torchrun --standalone --nproc-per-node 4 scripts/train.py parallel=tp2_cp2"


def load(
    argv: Sequence[str],
    config_dir: str | os.PathLike[str],
    *,
    name: str = "train",
    start_dir: str | os.PathLike[str] | None = None,
) -> Config:
    """The run that `argv` (without the script's name) describes, from the files in `config_dir`.

    name        the YAML file with the defaults list
    start_dir   what relative paths (data.path, data.tokenizer, train.resume, run.dir) count from; None = where the user started
    returns     a Config with absolute paths; the working folder is unchanged
    raises      ConfigError, one short message; SystemExit(0) after --help and --cfg, which rank 0 prints
    """
    folder = Path(config_dir)
    if not (folder / f"{name}.yaml").is_file():
        raise ConfigError(f"config folder {folder}: no file {name}.yaml in it")
    flags = [word for word in argv if word.startswith("-")]
    for flag in flags:
        if flag not in _FLAGS:
            raise ConfigError(_wrong_flag(flag))
    choices, values = _read(argv, folder)
    merged = _compose(folder, name, choices)
    for key, value in values.items():
        group, leaf = key.split(".")
        merged.setdefault(group, {})[leaf] = value
    cfg = convert.to_config(_resolve(merged))
    if {"--help", "-h"} & set(flags):
        _print_once(_help(cfg, folder, name))
        raise SystemExit(0)
    _make_paths_absolute(cfg, Path(start_dir) if start_dir is not None else Path.cwd())
    check(cfg)
    if "--cfg" in flags:
        _print_once(dump(cfg))
        raise SystemExit(0)
    return cfg


def load_dumped(path: str | os.PathLike[str]) -> Config:
    """The run that `dump` wrote to `path`, checked anew: the config.yaml of a run's folder.

    raises      ConfigError, naming the file
    """
    from omegaconf import OmegaConf

    try:
        values = OmegaConf.to_container(OmegaConf.load(Path(path)))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror}") from None
    except Exception as error:  # OmegaConf's and YAML's
        raise ConfigError(f"{path}: no config of a run: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: no config of a run: needed: groups of keys")
    cfg = convert.to_config({str(group): keys for group, keys in values.items()})
    check(cfg)
    return cfg


# ------------------------------------------------------------------------------------------------------------- command line


def _read(argv: Sequence[str], folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The group choices and the values in `argv`; of two for one key, the later counts."""
    choices: dict[str, str] = {}
    values: dict[str, Any] = {}
    for word in argv:
        if word.startswith("-"):
            continue
        key, equals, text = word.partition("=")
        key = key.lstrip("+")
        if not equals:
            known = key in convert.hints() or key in _options(folder)
            raise ConfigError(f"{word}: {f'write {key}=VALUE' if known else f'not understood; {_LEGAL}'}")
        if key.split(".")[0] == "hydra":
            values["run.chdir"] = _hydra_key(key, text)
        elif "." not in key and key in _options(folder):
            choices[key] = _option(key, text, folder)
        elif key in convert.hints():
            values[key] = _value(key, text)
        else:
            raise ConfigError(_unknown(key, folder))
    return choices, values


def _hydra_key(key: str, text: str) -> Any:
    if key != "hydra.job.chdir":
        remedy = "the run's folder is run.dir" if key == "hydra.run.dir" else "of Hydra's own keys only hydra.job.chdir is used"
        raise ConfigError(f"{key}={text}: {remedy}")
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"{key}={text}: needed: true or false")
    return text.lower() == "true"


def _wrong_flag(flag: str) -> str:
    if _LAUNCHER.match(flag):
        return (
            f"{flag}: a launcher's flag, not an option of this script; give it to torchrun, before the script's name "
            f"({_EXAMPLE}), which tells each process its rank; {_LEGAL}"
        )
    bare, _, text = flag.lstrip("-").partition("=")
    keys = [key for key in convert.hints() if bare in (key, key.split(".")[1])]
    guess = f"{keys[0]}={text or 'VALUE'}" if len(keys) == 1 else convert.closest(flag, _FLAGS)
    return f"{flag}: no such flag. {convert.did_you_mean(guess)}{_LEGAL[0].upper()}{_LEGAL[1:]}"


def _options(folder: Path) -> dict[str, list[str]]:
    """Group -> its options: the files in the folder of that name."""
    groups = (sub for sub in sorted(folder.iterdir()) if sub.is_dir() and not sub.name.startswith("."))
    return {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups if any(group.glob("*.yaml"))}


def _option(group: str, text: str, folder: Path) -> str:
    options = _options(folder)[group]
    if text in options or (text == "null" and group not in convert.groups()):
        return text
    close = None if text.startswith("{") else convert.closest(text, options)
    guess = convert.did_you_mean(close and f"{group}={close}")
    raise ConfigError(
        f"{group}={text}: no such option. {guess}Options: {', '.join(options)}; single keys are set by {group}.KEY=VALUE"
    )


def _unknown(key: str, folder: Path) -> str:
    if "." in key:
        return convert.unknown_key(key)
    same_end = [known for known in convert.hints() if known.split(".")[1] == key]
    close = same_end[0] if len(same_end) == 1 else convert.closest(key, _options(folder))
    groups = ", ".join(_options(folder))
    return f"{key}: no such group. {convert.did_you_mean(close)}Groups: {groups}; single keys are set by GROUP.KEY=VALUE"


def _value(key: str, text: str) -> Any:
    """What `text` means for `key`: a text keeps every character, anything else is read by Hydra's grammar."""
    if str in (convert.hints()[key], *get_args(convert.hints()[key])):
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            return text[1:-1]
        return None if text == "null" else text
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException:
        raise ConfigError(f"{key}={text}: needed: {convert.needed(key)}") from None
    if override.is_sweep_override():
        raise ConfigError(f"{key}={text}: several values are not supported, start one run for each")
    return override.value()


# -------------------------------------------------------------------------------------------------------------------- files


def _compose(folder: Path, name: str, choices: dict[str, str]) -> dict[str, Any]:
    """The files that the defaults list and `choices` select, merged by Hydra, interpolations untouched."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    overrides = [f"~{group}" if option == "null" else f"{group}={option}" for group, option in choices.items()]
    try:
        with initialize_config_dir(config_dir=str(folder.absolute()), version_base="1.3"):
            composed = compose(name, overrides=overrides)
    except Exception as error:  # Hydra's own, OmegaConf's and YAML's: whatever it is, the files are at fault
        raise ConfigError(f"{folder}: the config files do not fit together: {' '.join(str(error).split())}") from None
    merged = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(merged, dict)
    return {str(group): keys for group, keys in merged.items()}


def _resolve(merged: dict[str, Any]) -> dict[str, Any]:
    """Interpolations such as ${train.steps} and ${oc.env:HOME}, replaced by their values."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', '')}: {str(error).splitlines()[0]}") from None
    assert isinstance(resolved, dict)
    return {str(group): keys for group, keys in resolved.items()}


def _make_paths_absolute(cfg: Config, start: Path) -> None:
    def absolute(path: str) -> str:
        return os.path.abspath(start / os.path.expanduser(path))

    if cfg.data.path is not None:
        cfg.data.path = absolute(cfg.data.path)
    if cfg.data.tokenizer not in ("auto", "bytes", ""):
        cfg.data.tokenizer = absolute(cfg.data.tokenizer)
    if cfg.run.dir is not None:
        cfg.run.dir = absolute(cfg.run.dir)
    if isinstance(cfg.train.resume, str) and cfg.train.resume not in ("auto", ""):
        cfg.train.resume = absolute(cfg.train.resume)


# --------------------------------------------------------------------------------------------------------------------- help


def _print_once(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text)
        sys.stdout.flush()


def _help(cfg: Config, folder: Path, name: str) -> str:
    """Usage, the groups with their options, and every key with its type, present value and meaning."""
    lines = [
        f"{_EXAMPLE} data.path=my.txt",
        "  trains a transformer, its weights sharded over tp, its tokens over cp; without torchrun, on one process",
        "",
        "--help   this text    --cfg   the whole configuration as YAML, nothing is run",
        "",
        f"GROUP=OPTION chooses a file of {folder}:",
    ]
    lines += [f"  {group:<11} {', '.join(options)}" for group, options in _options(folder).items()]
    lines += ["", "GROUP.KEY=VALUE sets one key; here with the value that the files and this command line give it:"]
    for key in convert.hints():
        group, leaf = key.split(".")
        value = getattr(getattr(cfg, group), leaf)
        setting = f"{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        lines += [f"  {setting:<34} {convert.meaning(key)}  ({convert.needed(key)})"]
    return "\n".join(lines) + "\n"
