"""Plain values from YAML or a command line -> the dataclasses of `schema`, or one message that says what is wrong.

A number may be written as text (tp='2' is 2): whole numbers only where a whole number is needed, true and false only where a
truth value is. Everything else is refused by its full key, so no value is accepted that means something else than it says.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tpattn.config.schema import Config, ConfigError

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def groups() -> dict[str, type]:
    """Group -> its dataclass."""
    return dict(get_type_hints(Config))


@cache
def hints() -> dict[str, Any]:
    """Full key -> hint, for every key there is."""
    return {f"{group}.{name}": hint for group, schema in groups().items() for name, hint in get_type_hints(schema).items()}


def meaning(key: str) -> str:
    """What `key` says about itself in the schema."""
    return str(_notes()[key][0])


def needed(key: str) -> str:
    """The values that `key` takes, in words."""
    return " ".join(_notes()[key][1:]) or _in_words(hints()[key])


@cache
def _notes() -> dict[str, tuple[str, ...]]:
    """Full key -> what its hint carries beside the type."""
    every = {group: get_type_hints(schema, include_extras=True) for group, schema in groups().items()}
    return {f"{group}.{name}": hint.__metadata__ for group, keys in every.items() for name, hint in keys.items()}


def to_config(values: Mapping[str, Any]) -> Config:
    """{group: {key: value}} -> Config; what is left out keeps its default. ConfigError with the full key."""
    made = {}
    for group, keys in values.items():
        if group not in groups():
            raise ConfigError(unknown_key(str(group)))
        if not isinstance(keys, Mapping):
            raise ConfigError(f"{group}={show(keys)}: needed: the keys {names_in(group)}, each as {group}.KEY=VALUE")
        for name in keys:
            if f"{group}.{name}" not in hints():
                raise ConfigError(unknown_key(f"{group}.{name}"))
        made[group] = groups()[group](**{name: to_value(f"{group}.{name}", value) for name, value in keys.items()})
    return Config(**made)


def to_value(key: str, value: Any) -> Any:
    """`value` in the type that `key` needs."""
    hint = hints()[key]
    if value == "???":  # how YAML says that there is no default
        raise ConfigError(f"{key}: needs a value, {key}=VALUE: {meaning(key)}")
    made = _fit(value, hint)
    if made is _NO:
        words = [word for word in _words(hint) if isinstance(word, str)]
        close = closest(value, words) if isinstance(value, str) else None
        raise ConfigError(f"{key}={show(value)}: needed: {needed(key)}{f'. Did you mean {close}?' if close else ''}")
    return made


def _in_words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_in_words(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return get_args(hint)[0] if len(get_args(hint)) == 1 else "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a list of {len(get_args(hint))} numbers, [a,b]"
    return _NAMES[hint]


def names_in(group: str) -> str:
    return ", ".join(get_type_hints(groups()[group]))


def closest(name: Any, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` was probably meant to be."""
    found = difflib.get_close_matches(str(name).lower(), list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown_key(key: str) -> str:
    """The message for a key that does not exist: full path, closest match, legal keys."""
    if "_target_" in key.split("."):
        return f"{key}: no config of tpattn names Python objects, and none is called; a model is described by model.*"
    group, _, name = key.partition(".")
    same_end = [known for known in hints() if known.split(".")[1] == key.split(".")[-1]]
    if group in groups():
        close = closest(name, get_type_hints(groups()[group]))
        guess = f"{group}.{close}" if close else (same_end[0] if same_end else None)
        legal = f"Keys of {group}: {names_in(group)}"
    else:
        guess = same_end[0] if len(same_end) == 1 else closest(key, hints())
        legal = f"Keys begin with {', '.join(groups())}; --help lists them all"
    return f"{key}: no such key. {did_you_mean(guess)}{legal}"


def did_you_mean(guess: str | None) -> str:
    return f"Did you mean {guess}? " if guess else ""


def show(value: Any) -> str:
    """`value` as a person would type it, shortened."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_NO = object()


def _words(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(word for part in get_args(hint) for word in _words(part))
    return ("true", "false") if hint is bool else ()


def _fit(value: Any, hint: Any) -> Any:
    """`value` as `hint`, or _NO."""
    if get_origin(hint) in (Union, types.UnionType):
        return next((made for made in (_fit(value, part) for part in get_args(hint)) if made is not _NO), _NO)
    if get_origin(hint) is Literal:
        return value if isinstance(value, str) and value in get_args(hint) else _NO
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            return _NO
        made = tuple(_fit(item, part) for item, part in zip(value, parts, strict=True))
        return _NO if _NO in made else made
    if hint is type(None):
        return None if value is None else _NO
    if hint is bool:
        truths = {"true": True, "false": False}
        return value if isinstance(value, bool) else truths.get(value.lower(), _NO) if isinstance(value, str) else _NO
    if isinstance(value, bool):
        return _NO
    if hint is str:
        return value if isinstance(value, str) else _NO
    if isinstance(value, hint):
        return value if math.isfinite(value) else _NO
    if isinstance(value, str) or (hint is float and isinstance(value, int)):
        try:
            made_number = hint(value)
        except (ValueError, OverflowError):
            return _NO
        return made_number if math.isfinite(made_number) else _NO
    return _NO
