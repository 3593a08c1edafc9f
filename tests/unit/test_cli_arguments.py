# SPDX-License-Identifier: Apache-2.0
"""The command line: options in any order, help, and errors that are the user's to mend in one line with status 2."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from robo_rl.app import cli
from robo_rl.app.train_sim import TrainSimConfig
from robo_rl.config import CONFIGS
from robo_rl.errors import ContractError

ROOT = Path(__file__).parents[2]
REACH = str(CONFIGS / "train" / "reach.yaml")


@pytest.fixture
def trained(monkeypatch):
    """What train_sim was called with, instead of training."""
    calls = []

    def train_sim(config: TrainSimConfig, run_dir: Path, resume: bool, live: bool | None):
        calls.append((config, run_dir, resume, live))
        return {"interrupted": False}

    monkeypatch.setattr("robo_rl.app.train_sim.train_sim", train_sim)
    return calls


@pytest.mark.parametrize(
    "arguments",
    [
        [REACH, "--seed", "3", "--env.num-envs", "64", "--run-dir", "DIR", "--plain"],
        ["--plain", "--seed", "3", "--run_dir", "DIR", "--env.num_envs", "64", REACH],
        ["--seed", "3", REACH, "--run-dir=DIR", "--env.num-envs=64", "--plain"],
    ],
)
def test_options_come_in_any_order_and_spelling(trained, arguments):
    assert cli.main(["train", *arguments]) == 0
    [(config, run_dir, resume, live)] = trained
    assert (config.seed, config.env.num_envs, config.env.task) == (3, 64, "reach")
    assert (run_dir, resume, live) == (Path("DIR"), False, False)


def test_a_run_directory_is_named_after_the_configuration(trained):
    assert cli.train([REACH, "--seed", "5"]) == 0
    assert trained[0][1].parent == Path("runs/reach")
    assert trained[0][1].name.endswith("-s5")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], ["Name a configuration", "configs/train/demo.yaml"]),
        (["offline"], ["Name a configuration", "configs/offline/"]),
        (["train", "configs/train/raech.yaml"], ["no file", "reach.yaml"]),
        (["train", REACH, "env.num_envs=64"], ["`--env.num-envs 64`"]),
        (["train", "--resume", "nowhere"], ["`nowhere`", "not a run directory"]),
        (["train", "--resume", "nowhere", "--seed", "3"], ["nothing else"]),
        (["train", REACH, "--resume", "nowhere"], ["nothing else"]),
        (["evaluate", "nowhere"], ["`nowhere` does not say its environment", "--config"]),
        (["evaluate", "nowhere", "--config", REACH], ["no actor `nowhere`", "expert"]),
        (["collect", "expert", "--out", "x"], ["`expert` does not say its environment"]),
        (["trian"], ["unknown command `trian`", "train"]),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "Traceback" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("error", "status", "word"),
    [
        (ContractError("does not fit"), 2, "does not fit"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x"), 2, "disk is full"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_have_their_status(monkeypatch, capsys, error, status, word):
    def fail(*_):
        raise error

    monkeypatch.setattr("robo_rl.app.train_sim.train_sim", fail)
    assert cli.train([REACH]) == status
    assert word in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("robo_rl.app.train_sim.train_sim", fail)
    with pytest.raises(ZeroDivisionError):
        cli.train([REACH])


def test_help_lists_every_field_of_the_configuration(capsys):
    assert cli.train(["--help"]) == 0
    assert "--resume" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        cli.train([REACH, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for word in ("--run-dir", "--env.num-envs", "--algorithm.gae-lambda", "--evaluation.episodes"):
        assert word in out


def test_a_dry_run_prints_shapes_and_writes_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.train([REACH, "--dry-run", "--env.num-envs", "4", "--evaluation.no-video"]) == 0
    out = capsys.readouterr().out
    for word in (
        "tabletop/reach",
        "observation.state  (4, ",
        "action       (4, 6)",
        "parameters",
        "updates of 128 steps",
    ):
        assert word in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["train_sim", "train_offline", "evaluate", "collect", "bench", "doctor"])
def test_scripts_run_from_anywhere(script, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / f"{script}.py"), "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout
