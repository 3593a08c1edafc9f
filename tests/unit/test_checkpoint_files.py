# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what comes back, what a kill or a full disk leaves behind, what is refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from robo_rl import checkpoint
from robo_rl.config import to_dict
from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import ArraySpec, Continuous, EnvSpec, SuccessSpec

SPEC = EnvSpec(
    name="tabletop/lift",
    num_envs=4,
    obs={"observation.state": ArraySpec((3,), names=("a", "b", "c")), "task_id": ArraySpec((), "int64")},
    action=Continuous((-1.0, float("-inf")), (1.0, float("inf")), ("pan", "lift"), ("rad", "rad")),
    control_hz=20.0,
    max_episode_steps=50,
    tasks=("lift the cube",),
    success=SuccessSpec("height", 0.05, "m", 5, "end"),
    convention={"action": "joint_delta", "gripper": "positive opens"},
    simulator="mujoco 3.3.7",
)


def save(root: Path, step: int, value: float = 0.0, size: int = 8, keep: int = 3) -> Path:
    parts = {"policy": {"weight": torch.full((size,), value)}, "rng": {"state": torch.arange(5, dtype=torch.uint8)}}
    return checkpoint.save(root, step, parts, {"cpu_s": value}, {"env": to_dict(SPEC)}, keep)


def test_everything_comes_back(tmp_path):
    flat = torch.arange(6.0)
    parts = {
        "policy": {"w": flat[:4].view(2, 2).T, "b": flat[4:], "same": flat[4:]},  # shared storage, not contiguous
        "env": {"mask": torch.tensor([True, False]), "count": torch.tensor(7), "half": torch.ones(2).bfloat16()},
        "arrays": {"state": np.arange(3, dtype=np.int64)},
    }
    saved = checkpoint.save(tmp_path, 5, parts, {"cpu_s": 1.5}, {"env": to_dict(SPEC), "policy": {"kind": "x"}})
    loaded = checkpoint.load(tmp_path)
    assert loaded.path == saved
    assert loaded.env_spec == SPEC
    assert (loaded.state["step"], loaded.state["cpu_s"], loaded.spec["policy"]) == (5, 1.5, {"kind": "x"})
    for part in ("policy", "env"):
        for name, tensor in parts[part].items():
            assert torch.equal(loaded.parts[part][name], tensor)
            assert loaded.parts[part][name].dtype == tensor.dtype
    assert np.array_equal(loaded.parts["arrays"]["state"].numpy(), [0, 1, 2])
    assert (tmp_path / "last").read_text() == saved.name
    assert sorted(p.name for p in saved.iterdir()) == sorted(
        ["policy.safetensors", "env.safetensors", "arrays.safetensors", "state.json", "spec.json", "COMPLETE"]
    )


def test_numpy_needs_no_torch(tmp_path):
    save(tmp_path, 1, 2.5)
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['mujoco'] = None\n"
        "from pathlib import Path; import numpy as np; from robo_rl import checkpoint\n"
        f"c = checkpoint.load(Path({str(tmp_path)!r}), 'numpy'); assert (c.parts['policy']['weight'] == 2.5).all()\n"
        f"checkpoint.save(Path({str(tmp_path)!r}), 2, {{'policy': {{'w': np.ones(3)}}}}, {{}}, {{}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch.equal(checkpoint.load(tmp_path).parts["policy"]["w"], torch.ones(3, dtype=torch.float64))


def test_the_newest_are_kept_in_order_of_steps(tmp_path):
    for step in (5, 50, 500, 5000):
        save(tmp_path, step, keep=2)
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step_000000000500", "step_000000005000"]
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(ConfigError, match=r"checkpoint\.keep is 0"):
        save(tmp_path, 6000, keep=0)


def test_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 1, 1.0)
    save(tmp_path, 1, 2.0)
    assert checkpoint.load(tmp_path).parts["policy"]["weight"][0] == 2.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step_000000000001"]


def test_incomplete_directories_are_ignored(tmp_path):
    whole = save(tmp_path, 1)
    (save(tmp_path, 2) / "COMPLETE").unlink()
    assert checkpoint.latest(tmp_path) == whole
    assert checkpoint.load(tmp_path).path == whole
    with pytest.raises(ContractError, match="no complete checkpoint"):
        checkpoint.load(tmp_path / "step_000000000002")
    with pytest.raises(ContractError, match="no complete checkpoint"):
        checkpoint.load(tmp_path / "nowhere")


KILLED = """
import sys, torch
from pathlib import Path
from robo_rl import checkpoint
root = Path(sys.argv[1])
for step in range(1, 10**6):
    x = torch.full((300_000,), float(step))
    checkpoint.save(root, step, {"policy": {"weight": x}, "env": {"x": x}}, {"value": step}, {}, keep=2)
    print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    for round_ in range(3):
        root = tmp_path / str(round_)
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(root)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        time.sleep(0.05 + 0.037 * round_)
        process.send_signal(signal.SIGKILL)
        process.wait()
        reported = [1, *map(int, process.stdout.read().split())]
        loaded = checkpoint.load(root)
        assert loaded.state["step"] >= reported[-1], "a checkpoint that was reported as written is gone"
        for found in checkpoint.complete(root):
            one = checkpoint.load(found)
            for part in ("policy", "env"):
                assert (next(iter(one.parts[part].values())) == one.state["value"]).all()


def test_a_death_at_every_single_call_loses_nothing(tmp_path, monkeypatch):
    """The same, systematically: die before the n-th write, rename or fsync, for every n."""

    class Died(BaseException):
        pass

    def dying(original, countdown):
        def call(*args, **kwargs):
            countdown[0] -= 1
            if countdown[0] < 0:
                raise Died
            return original(*args, **kwargs)

        return call

    save(tmp_path, 1, 1.0)
    deaths = 0
    for n in range(100):
        countdown = [n]
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_write", dying(checkpoint._write, countdown))
            patch.setattr(Path, "rename", dying(Path.rename, countdown))
            patch.setattr(checkpoint.os, "fsync", dying(os.fsync, countdown))
            with contextlib.suppress(Died):
                save(tmp_path, 2, 2.0)
                break
        deaths += 1
        loaded = checkpoint.load(tmp_path)
        assert (loaded.parts["policy"]["weight"] == loaded.state["step"]).all()
    assert deaths > 8
    assert checkpoint.load(tmp_path).state["step"] == 2
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_is_said_and_loses_nothing(tmp_path, monkeypatch):
    save(tmp_path, 1, 1.0)

    def full(path, data):
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(ContractError, match=r"disk is full.*step 2.*`step_000000000001`, is whole"):
        save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step_000000000001"]
    assert checkpoint.load(tmp_path).state["cpu_s"] == 1.0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
def test_a_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"cannot mount: {mount.stderr.strip()}")
    try:
        save(disk, 1, 1.0, size=40_000)
        with pytest.raises(ContractError, match="disk is full"):
            save(disk, 2, 2.0, size=40_000)
        assert (checkpoint.load(disk).parts["policy"]["weight"] == 1.0).all()
        assert sorted(p.name for p in disk.iterdir()) == ["last", "step_000000000001"]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_damage_is_said(tmp_path):
    found = save(tmp_path, 1, size=1000)
    file = found / "policy.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ContractError, match="damaged"):
        checkpoint.load(tmp_path)
    save(tmp_path, 1)
    state = json.loads((found / "state.json").read_text())
    (found / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(ContractError, match="format 99"):
        checkpoint.load(tmp_path)


def test_a_pickle_in_disguise_is_never_run(tmp_path):
    found = save(tmp_path, 1)
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (marker,))

    torch.save(Evil(), found / "policy.safetensors")
    with pytest.raises(ContractError, match="damaged"):
        checkpoint.load(tmp_path)
    assert not marker.exists()


KEYS = ("observation.state",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"obs": {"observation.state": ArraySpec((4,))}}, ["observation.state", "(3,)", "(4,)"]),
        ({"obs": {}}, ["observation.state", "(3,)", "has only []"]),
        ({"action": Continuous((-2.0,), (2.0,))}, ["action", "'pan'", "-2.0"]),
        ({"control_hz": 10.0}, ["control rate", "20.0 Hz", "10.0 Hz"]),
        ({"convention": {"gripper": "positive closes"}}, ["`gripper`", "`positive opens`", "`positive closes`"]),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(change, words):
    with pytest.raises(ContractError) as caught:
        checkpoint.check_fits(SPEC, replace(SPEC, **change), KEYS)
    for word in [*words, "tabletop/lift"]:
        assert word in str(caught.value)


def test_what_merely_differs_is_a_warning():
    assert checkpoint.check_fits(SPEC, replace(SPEC, num_envs=99), KEYS) == []
    [warning] = checkpoint.check_fits(SPEC, replace(SPEC, simulator="mujoco 3.4.0"), KEYS)
    assert "mujoco 3.3.7" in warning
    assert "mujoco 3.4.0" in warning
