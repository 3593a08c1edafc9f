# SPDX-License-Identifier: Apache-2.0
"""The main job through its command line, on the real tabletop: train, stop, resume, evaluate, collect."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from robo_rl.app import cli
from robo_rl.data.episodes import EpisodeFolder

ROOT = Path(__file__).parents[2]
REACH = str(ROOT / "configs/train/reach.yaml")
SMALL = ["--plain", "--env.num-envs", "8", "--algorithm.num-steps", "8", "--algorithm.minibatch-size", "32"]
SMALL += ["--evaluation.episodes", "4", "--evaluation.no-video"]


def _train(run_dir, *arguments):
    assert cli.train([REACH, "--run-dir", str(run_dir), *SMALL, *arguments]) == 0
    return json.loads((run_dir / "result.json").read_text())


def _parts(run_dir, step):
    folder = run_dir / "checkpoints" / f"step_{step:012d}"
    return {file.name: load_file(file) for file in folder.glob("*.safetensors")}


def test_resume_equals_uninterrupted_bit_for_bit(tmp_path):
    steps = 64 * 60  # past the 50 steps of an episode, so that resets are in it
    _train(tmp_path / "whole", "--total-env-steps", str(2 * steps))
    _train(tmp_path / "halves", "--total-env-steps", str(steps))
    config = tmp_path / "halves/config.yaml"
    config.write_text(config.read_text().replace(f"total_env_steps: {steps}", f"total_env_steps: {2 * steps}"))
    assert cli.train(["--resume", str(tmp_path / "halves"), "--plain"]) == 0
    whole, halves = (_parts(tmp_path / name, 2 * steps) for name in ("whole", "halves"))
    assert whole.keys() == halves.keys() >= {"policy.safetensors", "algorithm.safetensors", "rng.safetensors"}
    for part, tensors in whole.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, halves[part][name]), f"{part}: {name} differs after resuming"


def test_result_says_everything(tmp_path, capsys):
    result = _train(tmp_path / "run", "--total-env-steps", "64")
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1]) == result
    assert result["episodes"] == 4
    assert 0 <= result["successes"] <= 4
    assert result["interval"][0] <= result["metrics"]["eval/success_rate"] <= result["interval"][1]
    assert result["env_steps"] == 64
    assert result["cpu_s"] > 0
    run = tmp_path / "run"
    arguments = [REACH, "--run-dir", str(run), *SMALL, "--total-env-steps", "64"]
    assert result["command"] == shlex.join(["robo-rl", "train", *arguments])
    assert (run / "command.txt").read_text() == result["command"] + "\n"
    assert {"torch", "mujoco", "python"} <= result["versions"].keys()
    assert {p.name for p in run.iterdir()} >= {"config.yaml", "command.txt", "versions.json", "metrics.jsonl", "tb"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [64, 64]  # one update, one evaluation
    assert "time/fps" in lines[0]
    assert lines[1]["eval/mean_reward"] == result["metrics"]["eval/mean_reward"]


def test_a_checkpoint_evaluates_to_the_numbers_of_its_run(tmp_path):
    result = _train(tmp_path / "run", "--total-env-steps", "640")
    out = tmp_path / "evaluation"
    assert cli.evaluate([str(tmp_path / "run"), "--out", str(out), "--evaluation.episodes", "4"]) == 0
    again = json.loads((out / "result.json").read_text())
    assert again["metrics"]["eval/mean_reward"] == pytest.approx(result["metrics"]["eval/mean_reward"], rel=1e-6)


def test_the_expert_is_collected_and_read_back(tmp_path):
    out = tmp_path / "episodes"
    arguments = ["expert", "--config", REACH, "--out", str(out), "--episodes", "6", "--env.num-envs", "4"]
    assert cli.collect([*arguments, "--successful-only"]) == 0
    folder = EpisodeFolder(out)
    assert len(folder) == 6
    assert all(entry["success"] for entry in folder.index)
    assert len({(e["task_id"], e["episode"]) for e in folder.index}) == 6
    for arrays, entry in zip(folder, folder.index, strict=True):
        assert len(arrays["observation.state"]) == entry["length"] + 1
        assert arrays["action"].shape == (entry["length"], 6)
        assert arrays["truncated"][-1] or arrays["terminated"][-1]
    assert cli.collect(arguments) == 2, "a folder that holds something is refused"


def test_a_checkpoint_is_refused_by_an_environment_that_it_does_not_fit(tmp_path, capsys):
    _train(tmp_path / "run", "--total-env-steps", "64")
    lift = str(ROOT / "configs/train/lift.yaml")
    assert cli.evaluate([str(tmp_path / "run"), "--config", lift, "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "does not fit `tabletop/lift`" in message
    assert "observation.environment_state" in message


def test_ctrl_c_saves_and_says_how_to_continue(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, str(ROOT / "launch/train_sim.py"), REACH, "--run-dir", str(run), *SMALL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline, "training did not start"
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"--resume {run}" in output
    result = json.loads((run / "result.json").read_text())
    assert result["interrupted"]
    assert list((run / "checkpoints").glob("step_*/COMPLETE"))


def test_a_run_directory_is_never_overwritten(tmp_path, capsys):
    _train(tmp_path / "run", "--total-env-steps", "64")
    assert cli.train([REACH, "--run-dir", str(tmp_path / "run"), *SMALL]) == 2
    assert "--resume" in capsys.readouterr().err


def test_nan_in_training_saves_the_batch(tmp_path, capsys, monkeypatch):
    from robo_rl.loops.on_policy import OnPolicy

    collect = OnPolicy.collect

    def poisoned(self):
        rollout = collect(self)
        rollout.obs["observation.state"][0, 0, 0] = float("nan")
        return rollout

    monkeypatch.setattr(OnPolicy, "collect", poisoned)
    assert cli.train([REACH, "--run-dir", str(tmp_path / "run"), *SMALL]) == 2
    assert "non_finite_batch.safetensors" in capsys.readouterr().err
    assert load_file(tmp_path / "run/non_finite_batch.safetensors")["obs/observation.state"].isnan().any()


def test_a_death_within_a_checkpoint_leaves_no_hole_in_the_log(tmp_path, monkeypatch):
    """Killed just after a checkpoint is on disk: its step must be in the log already, or nobody will ever log it."""
    from robo_rl import checkpoint

    save = checkpoint.save

    def save_and_die(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    limits = ["--total-env-steps", "256", "--checkpoint.every", "128"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_die)
        assert cli.train([REACH, "--run-dir", str(tmp_path / "run"), *SMALL, *limits]) == 130
    assert checkpoint.load(tmp_path / "run").state["step"] == 128
    assert cli.train(["--resume", str(tmp_path / "run"), "--plain"]) == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == [64, 128, 192, 256, 256]
