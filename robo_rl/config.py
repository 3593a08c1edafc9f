# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses <-> YAML <-> command line. Needs neither torch nor a simulator.

A configuration is a tree of frozen dataclasses. Where a field may be one of several (`TabletopConfig |
ManiSkillConfig`), the YAML's `kind` says which. A section may be the path of another YAML file, relative to the file
that names it or to the folder of configurations that is installed with this package. There is no merging, no
interpolation and no environment variable.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from robo_rl.errors import ConfigError, near_matches

T = TypeVar("T")

# In the wheel, or in a clone.
_HERE = Path(__file__).parent
CONFIGS = _HERE / "_configs" if (_HERE / "_configs").is_dir() else _HERE.parent / "configs"


def load(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """The configuration in a YAML file, with command-line overrides such as `["--env.num-envs", "64"]`.

    Raises:
        ConfigError: an unknown key (with its path and near matches), a wrong type, a missing or unreadable file, files
            that name each other in a circle.
    """
    config = _build_file(cls, _find(str(path), Path()))
    return override(config, overrides) if overrides else config


def override(config: T, arguments: Sequence[str]) -> T:
    """The configuration with dotted command-line overrides; dashes and underscores both work, tuples take several
    values (`--policy.hidden 64 64`). Prints help and exits on `--help`."""
    import tyro

    for argument in arguments:
        hydra = re.fullmatch(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", argument)
        if hydra:
            key, value = hydra.groups()
            right = f"--{key.replace('_', '-')} {value}"
            raise ConfigError(f"Overrides are written with dashes: not `{argument}` but `{right}`.")
    return tyro.cli(
        tyro.conf.AvoidSubcommands[type(config)],  # type: ignore[misc]  # the YAML has chosen every kind
        default=config,
        args=list(arguments),
        prog=Path(sys.argv[0]).name + " CONFIG.yaml",
    )


def dump(config: Any) -> str:
    """YAML text that `load` reads back to an equal configuration."""
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False)


def to_dict(config: Any) -> dict[str, Any]:
    """A tree of plain dicts, lists and scalars, for YAML or JSON."""
    return _plain(config)


def differences(was: Any, now: Any, path: str = "") -> list[str]:
    """What differs between two trees of plain data: one sentence each, with the dotted path and both values."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        keys = dict.fromkeys([*was, *now])
        return [line for key in keys for line in differences(was.get(key), now.get(key), _join(path, key))]
    return [] if was == now else [f"`{path}` was {was!r} and is {now!r}"]


def read_yaml(path: Path) -> Any:
    """The contents of a YAML file through the safe loader, duplicate keys refused."""
    try:
        return _UniqueKeyLoader(path.read_text()).get_single_data()
    except (FileNotFoundError, IsADirectoryError):
        folder = path.parent if path.parent.is_dir() else Path()
        near = difflib.get_close_matches(path.name, [p.name for p in folder.glob("*.yaml")], n=3)
        hint = f" Did you mean {', '.join(f'`{folder / n}`' for n in near)}?" if near else ""
        raise ConfigError(f"There is no file `{path}`.{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` is not valid YAML: {error}") from None


def build(cls: Any, data: Any, where: str = "config", key: str = "", files: tuple[Path, ...] = ()) -> Any:
    """An instance of dataclass `cls` from plain data; every key and type checked on every level.

    Args:
        where: the file, for messages.
        key: the dotted path of `data` within it.
        files: the file that `data` is from, after those that led to it: a section that is the path of another YAML file
            is looked up beside it. Empty: such sections are refused.
    """
    at = f"`{key}` in {where}" if key else where
    if isinstance(data, str) and files and data.endswith((".yaml", ".yml")):
        return _build_file(cls, _find(data, files[-1].parent), files)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{at} must be a section of keys, got {data!r}.")
    cls = _choose(cls, data, at)
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    for name in data:
        if name not in known:
            hint = near_matches(str(name), known)
            raise ConfigError(f"Unknown key `{_join(key, str(name))}` in {where}. {hint}")
    values = {}
    for name, field in known.items():
        path = _join(key, name)
        if name in data:
            values[name] = _value(hints[name], data[name], where, path, files)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"`{path}` is missing in {where}.")
    return cls(**values)


def _build_file(cls: Any, path: Path, files: tuple[Path, ...] = ()) -> Any:
    """An instance of `cls` from a YAML file that `files`, one after another, led to."""
    resolved = [file.resolve() for file in files]
    if path.resolve() in resolved:
        circle = [*files[resolved.index(path.resolve()) :], path]
        said = " names ".join(f"`{file}`" for file in circle)
        raise ConfigError(f"Configuration files name each other in a circle: {said}. Write one of the sections out.")
    return build(cls, read_yaml(path), where=str(path), files=(*files, path))


def _value(hint: Any, data: Any, where: str, key: str, files: tuple[Path, ...]) -> Any:
    members = [h for h in _members(hint) if dataclasses.is_dataclass(h)]
    if members and not (data is None and type(None) in _members(hint)):
        return build(hint, data, where, key, files)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Mapping, dict) and isinstance(data, Mapping) and dataclasses.is_dataclass(arguments[1]):
        return {k: build(arguments[1], v, where, _join(key, k), files) for k, v in data.items()}
    import pydantic

    # Strict, so that "3" is no number and true no 1; through JSON, where a list is how a tuple is written.
    try:
        return _adapter(hint).validate_json(json.dumps(data, default=str), strict=True)
    except pydantic.ValidationError as error:
        reasons = "; ".join(e["msg"] for e in error.errors()[:3])
        raise ConfigError(f"`{key}` in {where} is {data!r}: {reasons}.") from None


@functools.cache
def _adapter(hint: Any) -> Any:
    import pydantic

    return pydantic.TypeAdapter(hint)


def _find(name: str, folder: Path) -> Path:
    """A YAML file relative to `folder`, else to the installed configurations; else where it might have been."""
    candidates = (folder / name, CONFIGS / name, CONFIGS / name.removeprefix("configs/"))
    likely = next((path for path in candidates if path.parent.is_dir()), candidates[0])
    return next((path for path in candidates if path.is_file()), likely)


def _choose(hint: Any, data: Mapping, at: str) -> Any:
    """The dataclass meant by `hint`; among several, the one whose `kind` the data names."""
    members = [h for h in _members(hint) if dataclasses.is_dataclass(h)]
    if len(members) == 1:
        return members[0]
    kinds: dict[str, Any] = {
        str(next(f.default for f in dataclasses.fields(m) if f.name == "kind")): m for m in members
    }
    kind = data.get("kind")
    if kind not in kinds:
        said = "does not say its kind" if kind is None else f"has the unknown kind `{kind}`"
        raise ConfigError(f"{at} {said}. Known: {', '.join(f'`{k}`' for k in sorted(kinds))}.")
    return kinds[kind]


def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, refusing a key given twice and an alias of what it lies in, reading `1e-3` as the number that it
    is."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        return super().construct_object(node, deep=True)  # what is built last may hold itself, and has no end

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            name = self.construct_object(key_node, deep=True)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{name}` is given twice", key_node.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """The safe dumper, quoting what the loader above would take for a number."""


# YAML 1.1 reads 1e-3 (no dot) as text.
for _yaml in (_UniqueKeyLoader, _Dumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\.inf|\.nan)$"),
        list("-+0123456789."),
    )
