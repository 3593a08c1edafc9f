# SPDX-License-Identifier: Apache-2.0
"""Configurations: every YAML builds, bad ones are refused with their path, round trips are exact."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.gaussian import GaussianConfig
from robo_rl.app import train_offline
from robo_rl.app.train_offline import TrainOfflineConfig
from robo_rl.app.train_sim import TrainSimConfig, dry_run
from robo_rl.config import build, dump, load, override
from robo_rl.errors import ConfigError
from sims.mujoco.tabletop import TabletopConfig

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs/train").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_yaml_loads_and_survives_a_round_trip(path, tmp_path):
    config = load(TrainSimConfig, path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(config))
    assert load(TrainSimConfig, copy) == config


@pytest.mark.parametrize("path", [p for p in CONFIGS if "maniskill" not in p.stem], ids=lambda p: p.stem)
def test_every_yaml_builds(path):
    config = load(TrainSimConfig, path, ["--env.num-envs", "2"])
    text = dry_run(config)
    assert config.policy.kind in text
    assert "parameters" in text


@pytest.mark.parametrize("path", sorted((ROOT / "configs/offline").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_offline_yaml_builds_and_survives_a_round_trip(path, tmp_path):
    config = load(TrainOfflineConfig, path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(config))
    assert load(TrainOfflineConfig, copy) == config
    assert config.policy.kind in train_offline.dry_run(config)


def _write(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env: {kind: tabletop, tsk: lift}\npolicy: {kind: gaussian}", r"`env.tsk` in .*bad.yaml. Did you mean `task`"),
        ("env: {kind: tabeltop}\npolicy: {kind: gaussian}", "unknown kind `tabeltop`"),
        ("env: {task: lift}\npolicy: {kind: gaussian}", "does not say its kind"),
        ("env: {kind: tabletop, task: lifd}\npolicy: {kind: gaussian}", r"`env.task` in .* is 'lifd'"),
        ("env: {kind: tabletop, num_envs: many}\npolicy: {kind: gaussian}", r"`env.num_envs` in .* is 'many'"),
        ("env: {kind: tabletop}", "`policy` is missing"),
        ("env: {kind: tabletop}\npolicy: {kind: gaussian}\nenv: {kind: tabletop}", "`env` is given twice"),
        ("env: [1, 2]\npolicy: {kind: gaussian}", "must be a section"),
        ("env: {kind: tabletop\n", "not valid YAML"),
        ("env: !!python/object/apply:os.system ['true']\npolicy: {}", "not valid YAML"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load(TrainSimConfig, _write(tmp_path, text))


def test_a_missing_file_names_its_neighbours():
    with pytest.raises(ConfigError, match=r"lift\.yaml"):
        load(TrainSimConfig, ROOT / "configs/train/lfit.yaml")


def test_a_section_may_be_another_file(tmp_path):
    (tmp_path / "env.yaml").write_text("kind: tabletop\ntask: push\n")
    config = load(TrainSimConfig, _write(tmp_path, "env: env.yaml\npolicy: {kind: gaussian}"))
    assert config.env == TabletopConfig(task="push")


def test_overrides_take_dashes_underscores_and_tuples():
    base = load(TrainSimConfig, ROOT / "configs/train/lift.yaml")
    config = override(base, ["--env.num-envs", "7", "--algorithm.num_steps", "9", "--policy.hidden", "32", "16"])
    assert (config.env.num_envs, config.algorithm.num_steps, config.policy.hidden) == (7, 9, (32, 16))
    assert config.env.task == "lift"


def test_a_hydra_override_is_answered_with_the_right_spelling():
    base = load(TrainSimConfig, ROOT / "configs/train/lift.yaml")
    with pytest.raises(ConfigError, match=r"--env\.num-envs 64"):
        override(base, ["env.num_envs=64"])


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
def test_dump_and_load_are_inverse(config):
    import yaml

    assert build(GaussianConfig, yaml.safe_load(dump(config))) == config


def test_all_configs_are_frozen():
    def classes(hint):
        for f in dataclasses.fields(hint):
            assert hint.__dataclass_params__.frozen, hint
            if dataclasses.is_dataclass(f.default_factory):
                classes(f.default_factory)

    classes(TrainSimConfig)


def test_the_light_base_imports_without_torch_and_mujoco():
    modules = "robo_rl robo_rl.types robo_rl.errors robo_rl.config robo_rl.seeding robo_rl.checkpoint robo_rl.tracking"
    modules += " robo_rl.tracking.run_dir robo_rl.tracking.tracker robo_rl.tracking.panel robo_rl.tracking.video"
    modules += " robo_rl.data.episodes real_robot"
    code = "import sys, importlib\nsys.modules['torch'] = sys.modules['mujoco'] = None\n"
    code += f"for module in {modules.split()}: importlib.import_module(module)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
