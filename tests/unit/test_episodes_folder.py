# SPDX-License-Identifier: Apache-2.0
"""Episode folders: what is written comes back without torch; what is damaged is said."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robo_rl.data.episodes import INDEX, EpisodeFolder, EpisodeWriter
from robo_rl.errors import ConfigError, ContractError
from robo_rl.types import ArraySpec, Continuous, EnvSpec

SPEC = EnvSpec(
    "toy", 2, {"observation.state": ArraySpec((3,))}, Continuous((-1.0,), (1.0,)), control_hz=10, max_episode_steps=9
)


def episode(length: int, success: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    ended = np.arange(length) == length - 1
    return {
        "observation.state": rng.normal(size=(length + 1, 3)).astype(np.float32),
        "action": rng.normal(size=(length, 1)).astype(np.float32),
        "reward": np.ones(length, np.float32),
        "terminated": np.zeros(length, bool),
        "truncated": ended,
        "success": ended & success,
    }


def write(folder: Path) -> list[dict[str, np.ndarray]]:
    written = [episode(4, True), episode(6, False), episode(5, True)]
    with EpisodeWriter(folder, SPEC, "expert") as writer:
        for i, arrays in enumerate(written):
            writer.add(arrays, task_id=0, episode=100 + i)
    return written


def test_what_was_written_comes_back(tmp_path):
    written = write(tmp_path / "episodes")
    folder = EpisodeFolder(tmp_path / "episodes")
    assert (folder.spec, folder.source, len(folder)) == (SPEC, "expert", 3)
    for arrays, original in zip(folder, written, strict=True):
        assert arrays.keys() == original.keys()
        for name, array in arrays.items():
            assert np.array_equal(array, original[name])
            assert array.dtype == original[name].dtype
    assert [(e["length"], e["return"], e["success"], e["episode"]) for e in folder.index] == [
        (4, 4.0, True, 100),
        (6, 6.0, False, 101),
        (5, 5.0, True, 102),
    ]
    assert [len(e["reward"]) for e in folder.episodes(successful_only=True)] == [4, 5]


def test_reading_needs_no_torch_and_no_simulator(tmp_path):
    write(tmp_path / "episodes")
    code = (
        "import sys\nfor m in ('torch', 'mujoco'): sys.modules[m] = None\n"
        "from pathlib import Path; from robo_rl.data.episodes import EpisodeFolder\n"
        f"print(sum(len(e['action']) for e in EpisodeFolder(Path({str(tmp_path / 'episodes')!r}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "15"), done.stderr


def test_a_folder_without_settings_is_never_written_twice(tmp_path):
    write(tmp_path / "episodes")
    with pytest.raises(ConfigError, match="is not empty"):
        EpisodeWriter(tmp_path / "episodes", SPEC, "expert")
    with pytest.raises(ConfigError, match="nothing of how they were collected"):
        EpisodeWriter(tmp_path / "episodes", SPEC, "expert", {"noise": 0.0})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        EpisodeWriter(tmp_path / "other", SPEC, "expert", {"noise": 0.0})


def test_what_was_written_is_readable_though_nobody_closed(tmp_path):
    writer = EpisodeWriter(tmp_path, SPEC, "expert", index_every_s=0.0)
    assert len(EpisodeFolder(tmp_path)) == 0
    for i in range(3):
        writer.add(episode(4, True), 0, i)
        assert [len(e["reward"]) for e in EpisodeFolder(tmp_path)] == [4] * (i + 1)


def test_the_index_is_not_rewritten_at_every_episode(tmp_path):
    with EpisodeWriter(tmp_path, SPEC, "expert", index_every_s=3600.0) as writer:
        for i in range(3):
            writer.add(episode(4, True), 0, i)
        assert len(EpisodeFolder(tmp_path)) == 0
    assert len(EpisodeFolder(tmp_path)) == 3


def test_a_folder_goes_on_under_the_same_settings_only(tmp_path):
    settings = {"noise": 0.1, "env": {"task": "lift", "cameras": ("front",)}}
    with EpisodeWriter(tmp_path, SPEC, "expert", settings) as writer:
        writer.add(episode(4, True), 0, 7)
        writer.progress = {"attempted": 2}
    (tmp_path / "episode_000001.safetensors").write_bytes(b"half written when the process died")
    (tmp_path / "result.json").touch()
    with EpisodeWriter(tmp_path, SPEC, "expert", settings) as writer:
        assert writer.progress == {"attempted": 2}
        assert [e["episode"] for e in writer.episodes] == [7]
        writer.add(episode(5, True), 0, 8)
    assert [len(e["reward"]) for e in EpisodeFolder(tmp_path)] == [4, 5]
    for spec, source, other, words in (
        (SPEC, "expert", settings | {"noise": 0.2}, r"`settings.noise` was 0.1 and is 0.2"),
        (SPEC, "expert", settings | {"env": {"task": "push"}}, r"`settings.env.task` was 'lift' and is 'push'"),
        (SPEC, "a run", settings, r"`source` was 'expert' and is 'a run'"),
        (replace(SPEC, simulator="toy 2"), "expert", settings, r"`spec.simulator` was '' and is 'toy 2'"),
    ):
        with pytest.raises(ConfigError, match=words):
            EpisodeWriter(tmp_path, spec, source, other)
    assert len(EpisodeFolder(tmp_path)) == 2


def test_a_folder_without_index_or_of_a_newer_format_is_refused(tmp_path):
    with pytest.raises(ContractError, match="not an episode folder"):
        EpisodeFolder(tmp_path)
    write(tmp_path / "episodes")
    path = tmp_path / "episodes" / INDEX
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"format": 99}))
    with pytest.raises(ContractError, match="format 99"):
        EpisodeFolder(tmp_path / "episodes")
    path.write_text("{")
    with pytest.raises(ContractError, match="not valid JSON"):
        EpisodeFolder(tmp_path / "episodes")


def test_damaged_episodes_are_named(tmp_path):
    write(tmp_path / "episodes")
    folder = EpisodeFolder(tmp_path / "episodes")
    path = tmp_path / "episodes" / folder.index[1]["file"]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ContractError, match=r"Episode 1 .*cannot be read"):
        folder[1]
    folder.index[2]["length"] = 3
    with pytest.raises(ContractError, match=r"Episode 2 .*rows, expected"):
        folder[2]
    folder.index[0]["file"] = "../elsewhere.safetensors"
    with pytest.raises(ContractError, match="outside"):
        folder[0]
