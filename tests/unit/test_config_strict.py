# SPDX-License-Identifier: Apache-2.0
"""Configurations beyond `test_config_files`: strict types, lookup from any folder, spellings of overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.categorical import CategoricalConfig
from robo_rl.app.train_sim import TrainSimConfig
from robo_rl.config import CONFIGS, load
from robo_rl.errors import ConfigError

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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TINY + "seed: '3'\n", ["`seed`", "tiny.yaml", "'3'", "valid integer"]),
        (TINY + "seed: true\n", ["`seed`", "valid integer"]),
        (TINY + "total_env_steps: 1.5\n", ["`total_env_steps`", "valid integer"]),
        (TINY + "device: 3\n", ["`device`", "valid string"]),
        (TINY + "evaluation: {video: 1}\n", ["`evaluation.video`", "valid boolean"]),
        (TINY.replace("[8]", "[8, wide]"), ["`policy.hidden`", "valid integer"]),
        (TINY + "zzz: 1\n", ["`zzz`", "Known: env, policy"]),
        (TINY + "seed: 1\nseed: 2\n", ["`seed` is given twice", "tiny.yaml", "line 4"]),
    ],
)
def test_wrong_types_are_refused_with_key_and_file(tmp_path, text, words):
    message = refused(write(tmp_path, text))
    for word in words:
        assert word in message


def test_an_error_in_another_file_names_that_file(tmp_path):
    write(tmp_path, "kind: tabletop\ntusk: push\n", "push.yaml")
    message = refused(write(tmp_path, TINY.replace("{kind: tabletop, task: reach, num_envs: 4}", "push.yaml")))
    assert "`tusk`" in message
    assert "push.yaml" in message


def test_a_folder_is_no_configuration(tmp_path):
    assert "no file" in refused(tmp_path)


def test_configurations_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = load(TrainSimConfig, CONFIGS / "train" / "reach.yaml")
    assert load(TrainSimConfig, "configs/train/reach.yaml") == expected
    assert load(TrainSimConfig, "train/reach.yaml") == expected


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
