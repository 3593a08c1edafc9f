# SPDX-License-Identifier: Apache-2.0
"""Results pages: rows are replaced by id, nothing is lost, the page says what the JSON says."""

import json
from dataclasses import replace

import pytest

from robo_rl.app import results
from robo_rl.errors import ConfigError

LIFT = results.Row(
    id="lift",
    claim="lift from zero",
    target="at least 95 %",
    measured="96.5 %",
    holds=True,
    counts="193/200",
    seeds=(0, 1, 2),
    command="python launch/train_sim.py configs/train/lift.yaml",
    wall_s=290.0,
    cpu_s=570.0,
    commit="abc1234",
)
PUSH = replace(
    LIFT, id="push", claim="push | any direction", holds=False, note="The goal behind the cube is not reached."
)


def test_rows_survive_the_file_and_are_replaced_by_id(tmp_path):
    results.update_page("main_job", [LIFT, PUSH], tmp_path)
    better = replace(LIFT, measured="99 %")
    results.update_page("main_job", [better], tmp_path)
    assert results.load_rows("main_job", tmp_path) == [better, PUSH]


def test_page_shows_failures_costs_commands_and_runs(tmp_path):
    results.save_record(
        "main_job", "lift_seed0", {"seed": 0, "success": 0.965, "command": "long", "curve": [1, 2]}, tmp_path
    )
    page = results.update_page("main_job", [LIFT, PUSH], tmp_path).read_text()
    assert "| lift from zero | at least 95 % | 96.5 % | yes | 193/200 | 0 1 2 | 290 | 570 |" in page
    assert "push \\| any direction" in page  # a bar would start a new cell
    assert "**no**" in page and PUSH.note in page
    assert "19 CPU-minutes, 10 minutes of wall time" in page  # 2 x 570 s and 2 x 290 s
    assert "`lift`: `python launch/train_sim.py configs/train/lift.yaml` at abc1234." in page
    assert "| run | seed | success |" in page and "| lift_seed0 | 0 | 0.965 |" in page


def test_an_interrupted_write_leaves_the_old_page(tmp_path, monkeypatch):
    results.update_page("speed", [LIFT], tmp_path)
    monkeypatch.setattr(results.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        results.update_page("speed", [PUSH], tmp_path)
    assert results.load_rows("speed", tmp_path) == [LIFT]


@pytest.mark.parametrize(
    ("entry", "message"),
    [({"id": "a", "colour": "red"}, "unknown fields \\['colour'\\]"), ({"id": "a"}, "row `a` is incomplete")],
)
def test_a_malformed_row_is_named(tmp_path, entry, message):
    (tmp_path / "speed.json").write_text(json.dumps([entry]))
    with pytest.raises(ConfigError, match=message):
        results.load_rows("speed", tmp_path)
