# SPDX-License-Identifier: Apache-2.0
"""Tracking: JSON lines, TensorBoard, console, run directory, video; without a terminal and with a full disk."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console as RichConsole

from robo_rl.errors import ConfigError, ContractError
from robo_rl.tracking import panel, run_dir
from robo_rl.tracking.run_dir import RunDir, versions
from robo_rl.tracking.tracker import Tracker
from robo_rl.tracking.video import BORDER, GREEN, GREY, VideoWriter, tile

METRICS = {"rollout/success_rate": 0.25, "rollout/ep_rew_mean": 3.5, "train/kl": 0.01, "train/value_loss": 0.5}


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 1\n")


def lines(run: RunDir) -> list[dict]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_every_metric_reaches_the_file_before_log_returns(run):
    tracker = Tracker(run, 1000, live=False)
    tracker.log(10, METRICS)
    [line] = lines(run)
    assert METRICS.items() <= line.items()
    assert (line["step"], abs(line["time"] - time.time()) < 60) == (10, True)
    tracker.close()


def test_tensorboard_holds_the_same_numbers(run):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = Tracker(run, 1000, live=False)
    for step in (10, 20):
        tracker.log(step, METRICS)
    tracker.close()
    events = tensorboard.EventAccumulator(str(run.path / "tb")).Reload()
    assert set(events.Tags()["scalars"]) == set(METRICS)
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("train/kl")] == [(10, 0.01), (20, 0.01)]


def test_a_resumed_run_logs_nothing_twice(run):
    tracker = Tracker(run, 1000, live=False)
    for step in (10, 20, 30):
        tracker.log(step, METRICS)
    tracker.close()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "ti')  # killed while writing
    tracker = Tracker(run, 1000, live=False, start_step=20)  # the last checkpoint
    tracker.log(30, {"train/kl": 0.02})
    tracker.close()
    assert [line["step"] for line in lines(run)] == [10, 20, 30]
    assert lines(run)[-1]["train/kl"] == 0.02
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = tensorboard.EventAccumulator(str(run.path / "tb")).Reload()
    assert [e.step for e in events.Scalars("train/kl")] == [10, 20, 30]


def test_a_run_that_died_before_its_first_checkpoint_starts_anew(run):
    for value in (1.0, 2.0):
        tracker = Tracker(run, 1000, live=False, start_step=0)
        tracker.log(10, {"train/kl": value})
        tracker.close()
    assert [line["train/kl"] for line in lines(run)] == [2.0]
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = tensorboard.EventAccumulator(str(run.path / "tb")).Reload()
    assert [e.value for e in events.Scalars("train/kl")] == [2.0]


def test_a_last_line_without_its_newline_is_kept_whole(run):
    (run.path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 20}')  # killed between the two
    tracker = Tracker(run, 1000, live=False, start_step=20)
    tracker.log(30, METRICS)
    tracker.close()
    assert [line["step"] for line in lines(run)] == [10, 20, 30]


def test_what_is_not_finite_becomes_null(run):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    tracker = Tracker(run, 1000, live=False)
    tracker.log(10, {"train/explained_variance": float("nan"), "train/kl": 0.5})
    tracker.close()
    line = json.loads((run.path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["train/explained_variance"], line["train/kl"]) == (None, 0.5)
    result = run.write_result({"metrics": {"loss": float("inf")}, "interval": (0.1, float("-inf"))})
    assert json.loads((run.path / "result.json").read_text(), parse_constant=refuse) == result
    assert (result["metrics"], result["interval"]) == ({"loss": None}, [0.1, None])


def test_tracking_works_without_torch(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nsys.modules['torch'] = sys.modules['mujoco'] = None\n"
        "from robo_rl.tracking import panel, run_dir, tracker, video\n"
        f"run = run_dir.RunDir.create(Path({str(tmp_path / 'run')!r}), 'seed: 1')\n"
        "t = tracker.Tracker(run, 100, live=False)\nt.log(100, {'train/kl': 0.5})\nt.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["train/kl"] == 0.5
    assert done.stdout.startswith("100%")
    assert not (tmp_path / "run/tb").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said(run):
    tracker = Tracker(run, 1000, live=False)
    tracker._jsonl.close()
    tracker._jsonl = Path("/dev/full").open("a")  # noqa: SIM115 (closed by the tracker)
    with pytest.raises(ContractError, match=r"disk is full.*step 10"):
        tracker.log(10, METRICS)
    tracker.close()


def test_a_run_directory_is_made_once(tmp_path):
    run = RunDir.create(tmp_path / "run", "seed: 1\n")
    assert {p.name for p in run.path.iterdir()} == {"config.yaml", "command.txt", "versions.json"}
    assert (run.path / "config.yaml").read_text() == "seed: 1\n"
    with pytest.raises(ConfigError, match=r"is not empty.*--resume"):
        RunDir.create(tmp_path / "run", "seed: 2\n")
    with pytest.raises(ConfigError, match=r"no run directory.*to resume"):
        RunDir.create(tmp_path / "missing", "seed: 2\n", resume=True)
    with pytest.raises(ConfigError, match=r"is a file"):
        RunDir.create(run.path / "config.yaml", "seed: 2\n")
    RunDir.create(tmp_path / "run", "seed: 2\n", resume=True)
    assert (run.path / "config.yaml").read_text() == "seed: 1\n"


def test_a_result_says_command_and_versions_and_is_written_whole(run):
    result = run.write_result({"env_steps": 7})
    assert json.loads((run.path / "result.json").read_text()) == result
    assert result["versions"] == versions()
    assert {"python", "numpy", "torch", "platform"} <= result["versions"].keys()
    assert result["command"]
    assert not list(run.path.glob("*.partial"))


def test_versions_are_kept_when_a_run_goes_on_under_others(run, monkeypatch, caplog):
    def recorded() -> list[dict]:
        return json.loads((run.path / "versions.json").read_text())

    [first] = recorded()
    assert first == versions()
    RunDir.create(run.path, "", resume=True)
    assert recorded() == [first] and not caplog.text, "the same versions are no news"
    other = {k: v for k, v in first.items() if k != "mujoco"} | {"torch": "99.0"}
    monkeypatch.setattr(run_dir, "versions", lambda: other)
    RunDir.create(run.path, "", resume=True)
    assert recorded() == [first, other]
    assert f"`torch` was {first['torch']!r} and is '99.0'" in caplog.text
    assert f"`mujoco` was {first['mujoco']!r} and is None" in caplog.text
    monkeypatch.undo()
    RunDir.create(run.path, "", resume=True)
    assert recorded() == [first, other, first]


def test_versions_of_before_there_was_a_list_are_kept(run):
    (run.path / "versions.json").write_text('{"torch": "1.0"}')
    RunDir.create(run.path, "", resume=True)
    assert json.loads((run.path / "versions.json").read_text()) == [{"torch": "1.0"}, versions()]
    (run.path / "versions.json").unlink()
    RunDir.create(run.path, "", resume=True)
    assert json.loads((run.path / "versions.json").read_text()) == [versions()]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["launch/train_sim.py", "a.yaml", "--seed", "3"], "python launch/train_sim.py a.yaml --seed 3"),
        (["/x/my runs/launch/collect.py", "expert"], "python '/x/my runs/launch/collect.py' expert"),
        (["/usr/bin/robo-rl", "train", "a b.yaml"], "robo-rl train 'a b.yaml'"),
        (["C:/Scripts/robo-rl.exe", "doctor"], "robo-rl doctor"),
        # Neither of these, run again, does what this process does: it called us from Python.
        (["/x/pytest/__main__.py", "-q"], "called from Python by: python -m pytest -q"),
        (["-c"], "called from Python by: python -m pytest -q"),
        ([""], "called from Python by: python -m pytest -q"),
    ],
)
def test_the_command_is_one_that_can_be_run_or_says_that_it_is_none(argv, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pytest", "-q"])
    assert run_dir.command() == expected
    with run_dir.commanded(["robo-rl", "train", "x y.yaml"]):
        assert run_dir.command() == "robo-rl train 'x y.yaml'"
    assert run_dir.command() == expected


def test_without_a_terminal_there_are_aligned_lines(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(panel.time, "perf_counter", lambda: clock[0])
    console = panel.Console("run", 10_000, live=None)  # pytest's stdout is no terminal
    for step in range(1000, 11_000, 1000):
        clock[0] += 2.0
        console.show(step, METRICS | {"time/progress": step / 10_000})
    console.close()
    out = capsys.readouterr().out.splitlines()
    assert 3 <= len(out) <= 5, "one every five seconds, and the last"
    assert re.match(r" 30% +3,000 steps +500/s +left +0:14 +success 25.0% +return 3.50", out[0]), out[0]
    assert out[-1].startswith("100%")
    assert len({line.index("steps") for line in out}) == 1


def test_the_panel_shows_what_matters(monkeypatch):
    console = panel.Console("my-run", 10_000, live=False)
    console._metrics = METRICS | {"time/progress": 0.5, "time/cpu_s": 10.0, "eval/success_rate": 0.9}
    console._first = (console._start, 0, 0.0)
    out = io.StringIO()
    RichConsole(file=out, width=100).print(console._panel(5000, 0.5, console._start + 60))
    for word in ("my-run", "5,000 of 10,000", "83 steps/s", "time left", "1:00", "25.0%", "90.0%", "value loss"):
        assert word in out.getvalue()
    assert "broken physics" not in out.getvalue()


def test_the_panel_costs_less_than_a_hundredth_of_a_core():
    from rich.live import Live

    console = panel.Console("run", 10_000, live=False)
    console._live = Live(console=RichConsole(file=io.StringIO(), force_terminal=True, width=100), auto_refresh=False)
    console.show(1, METRICS)
    console._printed = 0.0
    start = time.process_time()
    for step in range(20):
        console._printed = 0.0  # as if the time of a redraw had come
        console.show(step, METRICS)
    assert (time.process_time() - start) / 20 < 0.01 * panel.LIVE_EVERY


def test_tiles_show_success_and_order():
    frames = np.stack([np.full((24, 32, 3), 40 * (i + 1), np.uint8) for i in range(5)])
    picture = tile(frames, [(float(i), i == 2) for i in range(5)])
    assert picture.shape == (2 * 24, 3 * 32, 3)
    for i in range(5):
        y, x = i // 3 * 24, i % 3 * 32
        assert (picture[y, x] == (GREEN if i == 2 else GREY)).all()
        assert (picture[y + 24 - BORDER - 1, x + 32 - BORDER - 1] == 40 * (i + 1)).all()
    assert (picture[24:, 64:] == 0).all(), "the empty place stays black"
    assert (tile(frames)[0, 0] == 40).all(), "no border without captions"


def test_a_video_is_h264_with_every_frame(tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "folder" / "v.mp4"
    with VideoWriter(path, fps=20.0) as video:
        for t in range(10):
            video.add(np.full((3, 31, 45, 3), 20 * t, np.uint8), [(1.0, t >= 5)] * 3)  # odd sizes
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(stream)]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 20)
    assert len(frames) == 10
    assert frames[0].shape == (62, 90, 3)
    green = [int(f[1, 20, 1]) > int(f[1, 20, 0]) + 60 for f in frames]
    assert green == [False] * 5 + [True] * 5
