# SPDX-License-Identifier: Apache-2.0
"""Configurations: every YAML builds, bad ones are refused with their place, overrides, lookup from any folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.categorical import CategoricalConfig
from policies.gaussian import GaussianConfig
from robo_rl.algorithms.ppo import PPOConfig
from robo_rl.app import train_offline
from robo_rl.app.train_offline import TrainOfflineConfig
from robo_rl.app.train_sim import TrainSimConfig, dry_run
from robo_rl.config import CONFIGS, build, dump, load
from robo_rl.errors import ConfigError
from sims.mujoco.tabletop import TabletopConfig

TRAIN = sorted((CONFIGS / "train").glob("*.yaml"))
OFFLINE = sorted((CONFIGS / "offline").glob("*.yaml"))
TINY = """\
env: {kind: tabletop, task: reach, num_envs: 4}
policy: {kind: gaussian, hidden: [8]}
"""


def write(folder: Path, text: str, name: str = "tiny.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(path: Path, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(TrainSimConfig, path, overrides)
    return str(caught.value)


# --- the files we ship -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TRAIN, ids=lambda p: p.stem)
def test_every_yaml_loads_and_survives_a_round_trip(path, tmp_path):
    config = load(TrainSimConfig, path)
    assert load(TrainSimConfig, write(tmp_path, dump(config))) == config


@pytest.mark.parametrize("path", [p for p in TRAIN if "maniskill" not in p.stem], ids=lambda p: p.stem)
def test_every_yaml_builds(path):
    config = load(TrainSimConfig, path, ["--env.num-envs", "8"])  # one group of GRPO
    text = dry_run(config)
    assert config.policy.kind in text
    assert "parameters" in text


@pytest.mark.parametrize("path", OFFLINE, ids=lambda p: p.stem)
def test_every_offline_yaml_builds_and_survives_a_round_trip(path, tmp_path):
    config = load(TrainOfflineConfig, path)
    assert load(TrainOfflineConfig, write(tmp_path, dump(config))) == config
    assert config.policy.kind in train_offline.dry_run(config)


@given(
    st.builds(
        GaussianConfig,
        hidden=st.lists(st.integers(1, 512), max_size=3).map(tuple),
        log_std_init=st.floats(-5, 5),
        squash=st.booleans(),
        obs_keys=st.lists(st.text("abc.", min_size=1, max_size=5), max_size=2).map(tuple),
    )
)
@settings(max_examples=50, deadline=None)
def test_what_is_dumped_is_the_same_to_a_plain_loader(config):
    assert build(GaussianConfig, yaml.safe_load(dump(config))) == config


def test_all_configs_are_frozen():
    def classes(hint):
        for f in dataclasses.fields(hint):
            assert hint.__dataclass_params__.frozen, hint
            if dataclasses.is_dataclass(f.default_factory):
                classes(f.default_factory)

    classes(TrainSimConfig)


# --- what is refused, and how it is said -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TINY.replace("task", "tsk"), ["`env.tsk` in", "tiny.yaml. Did you mean `task`"]),
        (TINY.replace("tabletop", "tabeltop"), ["unknown kind `tabeltop`"]),
        (TINY.replace("kind: tabletop, ", ""), ["does not say its kind"]),
        (TINY.replace("reach", "lifd"), ["`env.task` in", "is 'lifd'"]),
        (TINY.replace("4", "many"), ["`env.num_envs` in", "is 'many'"]),
        (TINY.partition("policy")[0], ["`policy` is missing"]),
        ("env: [1, 2]\npolicy: {kind: gaussian}", ["must be a section"]),
        (TINY + "zzz: 1\n", ["`zzz`", "Known: env, policy"]),
        (TINY + "seed: 1\nseed: 2\n", ["`seed` is given twice", "tiny.yaml", "line 4"]),
        ("env: {kind: tabletop\n", ["not valid YAML"]),
        ("env: !!python/object/apply:os.system ['true']\npolicy: {}", ["not valid YAML"]),
        (TINY + "seed: '3'\n", ["`seed`", "tiny.yaml", "'3'", "valid integer"]),
        (TINY + "seed: true\n", ["`seed`", "valid integer"]),
        (TINY + "total_env_steps: 1.5\n", ["`total_env_steps`", "valid integer"]),
        (TINY + "device: 3\n", ["`device`", "valid string"]),
        (TINY + "evaluation: {video: 1}\n", ["`evaluation.video`", "valid boolean"]),
        (TINY.replace("[8]", "[8, wide]"), ["`policy.hidden`", "valid integer"]),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path, text, words):
    message = refused(write(tmp_path, text))
    for word in words:
        assert word in message


def test_a_missing_file_names_its_neighbours():
    assert "lift.yaml" in refused(CONFIGS / "train/lfit.yaml")


def test_a_folder_is_no_configuration(tmp_path):
    assert "no file" in refused(tmp_path)


# --- files that name files -------------------------------------------------------------------------------------------


def test_a_section_may_be_another_file(tmp_path):
    write(tmp_path, "kind: tabletop\ntask: push\n", "env.yaml")
    config = load(TrainSimConfig, write(tmp_path, "env: env.yaml\npolicy: {kind: gaussian}"))
    assert config.env == TabletopConfig(task="push")


def test_an_error_in_another_file_names_that_file(tmp_path):
    write(tmp_path, "kind: tabletop\ntusk: push\n", "push.yaml")
    message = refused(write(tmp_path, "env: push.yaml\npolicy: {kind: gaussian}"))
    assert "`tusk`" in message
    assert "push.yaml" in message


@dataclasses.dataclass(frozen=True)
class Node:
    left: Node | None = None
    right: Node | None = None


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"a": "a.yaml"}, ["a", "a"]),
        ({"a": "left: a.yaml"}, ["a", "a"]),
        ({"a": "right: b.yaml", "b": "left: {left: a.yaml}"}, ["a", "b", "a"]),
        ({"a": "left: b.yaml", "b": "left: c.yaml", "c": "left: b.yaml"}, ["b", "c", "b"]),
    ],
)
def test_files_that_name_each_other_in_a_circle_are_refused(tmp_path, files, circle):
    for name, text in files.items():
        write(tmp_path, text, f"{name}.yaml")
    with pytest.raises(ConfigError) as caught:
        load(Node, tmp_path / "a.yaml")
    assert " names ".join(f"`{tmp_path / name}.yaml`" for name in circle) in str(caught.value)


def test_a_circle_is_seen_through_other_spellings(tmp_path):
    path = write(tmp_path, f"left: ../{tmp_path.name}/tiny.yaml")
    with pytest.raises(ConfigError, match="in a circle"):
        load(Node, path)


def test_a_file_may_be_named_twice_without_a_circle(tmp_path):
    write(tmp_path, "left: {}", "leaf.yaml")
    assert load(Node, write(tmp_path, "left: leaf.yaml\nright: leaf.yaml")) == Node(Node(Node()), Node(Node()))


def test_an_alias_of_itself_is_refused(tmp_path):
    write(tmp_path, "&self\nleft: *self\n")
    with pytest.raises(ConfigError, match=r"tiny.yaml` is not valid YAML.*recursive"):
        load(Node, tmp_path / "tiny.yaml")
    assert "recursive" in refused(write(tmp_path, TINY.replace("[8]", "&self [*self]")))


def test_configurations_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = load(TrainSimConfig, CONFIGS / "train" / "reach.yaml")
    assert load(TrainSimConfig, "configs/train/reach.yaml") == expected
    assert load(TrainSimConfig, "train/reach.yaml") == expected


# --- overrides -------------------------------------------------------------------------------------------------------


def test_overrides_take_dashes_underscores_and_tuples():
    arguments = ["--env.num-envs", "7", "--algorithm.num_steps", "9", "--policy.hidden", "32", "16"]
    config = load(TrainSimConfig, CONFIGS / "train/lift.yaml", arguments)
    assert isinstance(config.policy, GaussianConfig) and isinstance(config.algorithm, PPOConfig)
    assert (config.env.num_envs, config.algorithm.num_steps, config.policy.hidden) == (7, 9, (32, 16))
    assert config.env.task == "lift"


def test_flags_and_optional_numbers_can_be_overridden(tmp_path):
    path = write(tmp_path, TINY + "evaluation: {video: true}\n")
    config = load(TrainSimConfig, path, ["--evaluation.no-video", "--max-cpu-minutes", "2.5"])
    assert (config.evaluation.video, config.max_cpu_minutes, config.env.num_envs) == (False, 2.5, 4)


def test_kind_is_chosen_by_the_file(tmp_path):
    path = write(tmp_path, TINY.replace("{kind: gaussian, hidden: [8]}", "{kind: categorical}"))
    assert isinstance(load(TrainSimConfig, path, ["--seed", "1"]).policy, CategoricalConfig)


@pytest.mark.parametrize("argument", ["env.num_envs=64", "+env.num_envs=64", "++env.num_envs=64"])
def test_every_hydra_spelling_is_answered_with_ours(tmp_path, argument):
    assert "`--env.num-envs 64`" in refused(write(tmp_path, TINY), [argument])


@pytest.mark.parametrize("arguments", [["--env.num-env", "64"], ["--seed", "many"], ["--env.task", "reech"]])
def test_bad_overrides_end_with_status_2(tmp_path, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        load(TrainSimConfig, write(tmp_path, TINY), arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err
