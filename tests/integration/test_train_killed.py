# SPDX-License-Identifier: Apache-2.0
"""Runs that were killed or interrupted go on as if nothing had happened; a second Ctrl-C ends at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from robo_rl import checkpoint
from robo_rl.app import cli

ROOT = Path(__file__).parents[2]
REACH = str(ROOT / "configs/train/reach.yaml")
SMALL = ["--plain", "--env.num-envs", "8", "--algorithm.num-steps", "8", "--algorithm.minibatch-size", "32"]
SMALL += ["--evaluation.episodes", "4", "--evaluation.no-video", "--evaluation.every", "640"]
SMALL += ["--checkpoint.every", "640", "--checkpoint.keep", "100", "--policy.hidden", "16"]
STEPS = 64 * 120


def start(run: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "launch/train_sim.py"), REACH, "--run-dir", str(run), *SMALL, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


def assert_same(one: Path, other: Path) -> None:
    a, b = checkpoint.load(one), checkpoint.load(other)
    assert a.state["step"] == b.state["step"] == STEPS
    assert a.parts.keys() == b.parts.keys()
    for part, tensors in a.parts.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, b.parts[part][name]), f"{part}: {name} differs"


def test_killed_and_interrupted_runs_end_like_an_undisturbed_one(tmp_path):
    limit = ["--total-env-steps", str(STEPS)]
    assert cli.train([REACH, "--run-dir", str(tmp_path / "whole"), *SMALL, *limit]) == 0

    killed = tmp_path / "killed"
    process = start(killed, *limit)
    wait_for(lambda: len(checkpoint.complete(killed / "checkpoints")) >= 2, "the second checkpoint")
    process.send_signal(signal.SIGKILL)
    process.wait()
    at_kill = checkpoint.load(killed).state["step"]
    assert at_kill < STEPS

    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch/train_sim.py"), "--resume", str(killed), "--plain"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    wait_for(lambda: checkpoint.load(killed).state["step"] > at_kill, "a checkpoint of the resumed run")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    interrupted = json.loads((killed / "result.json").read_text())
    assert interrupted["interrupted"]
    assert at_kill < interrupted["env_steps"] < STEPS
    assert checkpoint.load(killed).state["step"] == interrupted["env_steps"]

    assert cli.train(["--resume", str(killed), "--plain"]) == 0
    assert_same(tmp_path / "whole", killed)
    results = [json.loads((run / "result.json").read_text()) for run in (tmp_path / "whole", killed)]
    assert results[0]["metrics"]["eval/mean_reward"] == results[1]["metrics"]["eval/mean_reward"]
    assert results[1]["cpu_s"] > interrupted["cpu_s"], "the cost of all its parts"
    steps = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(64, STEPS + 1, 64), STEPS], "every update once, and the last evaluation"


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    # One iteration that lasts hours, in many short calls: the first Ctrl-C waits for its end.
    endless = ["--algorithm.epochs", "1000000000", "--algorithm.kl-stop", "None", "--algorithm.schedule", "constant"]
    process = start(tmp_path / "run", *endless)
    try:
        wait_for((tmp_path / "run" / "metrics.jsonl").exists, "the start")
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert process.poll() is None, "the first one lets the iteration end"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()
