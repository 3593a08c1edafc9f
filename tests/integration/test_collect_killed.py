# SPDX-License-Identifier: Apache-2.0
"""Collecting that is killed: what was written is readable, and the same command goes on with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from robo_rl.app import cli
from robo_rl.data.episodes import INDEX, EpisodeFolder
from robo_rl.seeding import first_training_episode

ROOT = Path(__file__).parents[2]
REACH = str(ROOT / "configs/train/reach.yaml")
WHAT = ["expert", "--config", REACH, "--env.num-envs", "4"]


def listed(folder: Path) -> int:
    return len(json.loads((folder / INDEX).read_text())["episodes"]) if (folder / INDEX).exists() else 0


def test_a_killed_collection_is_readable_and_goes_on(tmp_path, capsys):
    out = tmp_path / "killed"
    command = [sys.executable, str(ROOT / "launch/collect.py"), *WHAT, "--out", str(out), "--episodes", "100000"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 120
        while listed(out) < 5:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    before = listed(out)
    assert len(list(EpisodeFolder(out))) == before

    wanted = before + 10
    assert cli.collect([*WHAT, "--out", str(out), "--episodes", str(wanted)]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (result["written"], result["attempted"]) == (wanted, wanted)
    folder = EpisodeFolder(out)
    numbers = [e["episode"] for e in folder.index]
    first = first_training_episode(0)
    assert sorted(numbers) == list(range(first, first + wanted)), "none twice, none left out"

    whole = tmp_path / "whole"
    assert cli.collect([*WHAT, "--out", str(whole), "--episodes", str(wanted)]) == 0
    undisturbed = {e["episode"]: arrays for e, arrays in zip(*both(whole), strict=True)}
    for entry, arrays in zip(*both(out), strict=True):
        for name, array in arrays.items():
            assert np.array_equal(array, undisturbed[entry["episode"]][name]), name


def both(path: Path):
    folder = EpisodeFolder(path)
    return folder.index, list(folder)


def test_a_folder_of_other_settings_is_refused(tmp_path, capsys):
    out = ["--out", str(tmp_path / "episodes")]
    assert cli.collect([*WHAT, *out, "--episodes", "2"]) == 0
    assert cli.collect([*WHAT, *out, "--episodes", "2"]) == 0, "all there: nothing to do"
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1])["attempted"] == 2
    assert cli.collect([*WHAT, *out, "--episodes", "4", "--noise", "0.1"]) == 2
    message = capsys.readouterr().err
    assert "`settings.noise` was 0.0 and is 0.1" in message
    assert "new folder" in message
    assert len(EpisodeFolder(tmp_path / "episodes")) == 2


def test_successes_and_attempts_are_counted_over_both_calls(tmp_path, capsys):
    arguments = ["expert", "--config", REACH, "--env.num-envs", "4", "--out", str(tmp_path / "e"), "--noise", "0.8"]
    arguments += ["--successful-only"]
    results = []
    for episodes in ("6", "12"):
        assert cli.collect([*arguments, "--episodes", episodes]) == 0
        results.append(json.loads(capsys.readouterr().out.strip().splitlines()[-1]))
    folder = EpisodeFolder(tmp_path / "e")
    assert [r["written"] for r in results] == [6, 12] and results[1]["successes"] == len(folder)
    assert results[1]["attempted"] > results[0]["attempted"] >= 6
    assert results[1]["env_steps"] == sum(e["length"] for e in folder.index)
    assert len({e["episode"] for e in folder.index}) == 12
