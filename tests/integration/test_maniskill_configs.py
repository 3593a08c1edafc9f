# SPDX-License-Identifier: Apache-2.0
"""ManiSkill's training configurations build and act (the other ones: tests/unit/test_config_files.py)."""

import pytest

from robo_rl.app.train_sim import TrainSimConfig, dry_run
from robo_rl.config import CONFIGS, load

pytest.importorskip("mani_skill")


@pytest.mark.sim
@pytest.mark.parametrize("name", ["maniskill_pushcube", "maniskill_pickcube"])
def test_configuration_builds_and_acts(name):
    config = load(TrainSimConfig, CONFIGS / "train" / f"{name}.yaml", ["--env.num-envs", "1", "--evaluation.no-video"])
    text = dry_run(config)
    assert config.env.task in text
    assert "action       (1, " in text
