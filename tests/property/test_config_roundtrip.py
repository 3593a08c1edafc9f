# SPDX-License-Identifier: Apache-2.0
"""load(dump(config)) == config, for every kind of field that configurations use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from robo_rl import config as configuration
from robo_rl.types import ArraySpec, Continuous, Discrete, EnvSpec, SuccessSpec


@dataclass(frozen=True)
class Square:
    side: float
    kind: Literal["square"] = "square"


@dataclass(frozen=True)
class Circle:
    radius: float
    label: str = ""
    kind: Literal["circle"] = "circle"


@dataclass(frozen=True)
class Drawing:
    shape: Square | Circle
    count: int = 1
    visible: bool = True
    scale: float | None = None
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    colour: Literal["red", "blue"] = "red"
    spare: Circle | None = None
    notes: Mapping[str, str] = field(default_factory=dict)


# What a YAML file can hold: no surrogates and none of the control characters that YAML forbids.
TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=12)
TRAPS = st.sampled_from(
    ["1e3", "1.", ".5", "1_0", "no", "on", "null", "~", "", "2024-01-01", "0x10", "1:30", "- a", "a: b"]
)
STRINGS = TEXT | TRAPS
FLOATS = st.floats(allow_nan=False)
SHAPES = st.builds(Square, FLOATS) | st.builds(Circle, FLOATS, STRINGS)
DRAWINGS = st.builds(
    Drawing,
    shape=SHAPES,
    count=st.integers(-(2**40), 2**40),
    visible=st.booleans(),
    scale=st.none() | FLOATS,
    names=st.lists(STRINGS, max_size=3).map(tuple),
    sizes=st.lists(st.integers(0, 512), max_size=3).map(tuple),
    colour=st.sampled_from(["red", "blue"]),
    spare=st.none() | st.builds(Circle, FLOATS, STRINGS),
    notes=st.dictionaries(STRINGS, STRINGS, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(DRAWINGS)
def test_a_configuration_survives_yaml(tmp_path_factory, drawing):
    path = tmp_path_factory.getbasetemp() / "drawing.yaml"
    path.write_text(configuration.dump(drawing), encoding="utf-8")
    assert configuration.load(Drawing, path) == drawing


BOUNDS = st.lists(FLOATS, min_size=1, max_size=4).map(tuple)
SPECS = st.builds(
    EnvSpec,
    name=STRINGS,
    num_envs=st.integers(1, 4096),
    obs=st.dictionaries(STRINGS, st.builds(ArraySpec, st.lists(st.integers(1, 9)).map(tuple), STRINGS), max_size=3),
    action=BOUNDS.map(lambda b: Continuous(b, b, ("joint",) * len(b))) | st.builds(Discrete, st.integers(1, 9)),
    control_hz=st.floats(0.1, 1000),
    max_episode_steps=st.integers(1, 10**6),
    tasks=st.lists(STRINGS, min_size=1, max_size=3).map(tuple),
    success=st.none()
    | st.builds(SuccessSpec, STRINGS, FLOATS, STRINGS, st.integers(1, 9), st.sampled_from(["once", "end"])),
    convention=st.dictionaries(STRINGS, STRINGS, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(SPECS)
def test_an_environment_spec_survives_json(spec):
    data = json.loads(json.dumps(configuration.to_dict(spec)))
    assert configuration.build(EnvSpec, data, where="spec.json") == spec


def test_numbers_without_a_dot_are_numbers(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("shape: {kind: square, side: 1e-3}\nscale: 2E+5\n")
    drawing = configuration.load(Drawing, tmp_path / "a.yaml")
    assert drawing == Drawing(Square(1e-3), scale=2e5)
    assert yaml.safe_load("side: 1e-3") == {"side": "1e-3"}  # what a plain loader would have made of it
