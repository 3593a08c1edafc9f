# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run from end to end against the real peers; what they measure in so short a time says nothing."""

import json

import pytest

from robo_rl.app import bench


@pytest.mark.slow
def test_sim_and_ppo_measure_every_contender(capsys):
    pytest.importorskip("stable_baselines3")
    assert bench.main(["sim", "ppo", "--quick"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["id"] for row in rows] == [
        "sim-mj_step",
        "sim-async",
        "sim-lift",
        "sim-cameras",
        "ppo-cheetah",
        "ppo-lift",
    ]
    for row in rows:
        assert row["measured"] and "nan" not in row["measured"]
