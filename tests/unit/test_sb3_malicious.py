# SPDX-License-Identifier: Apache-2.0
"""Files that claim to be Stable-Baselines3's and are not: refused with a reason, and nothing in them runs."""

import io
import json
import os
import pickle  # noqa: TID251  # to write what must never be read
import zipfile
from typing import Any

import numpy as np
import pytest
import torch

from policies.sb3 import load_sb3
from policies.sb3_vecnormalize import read_vecnormalize
from robo_rl.errors import ConfigError
from robo_rl.types import STATE, ArraySpec, Continuous, EnvSpec

SPEC = EnvSpec("p", 1, {STATE: ArraySpec((3,))}, Continuous((-2.0,), (2.0,)), 20, 200)
WEIGHTS = {
    "log_std": torch.zeros(1),
    "mlp_extractor.policy_net.0.weight": torch.zeros(8, 3),
    "mlp_extractor.policy_net.0.bias": torch.zeros(8),
    "action_net.weight": torch.zeros(1, 8),
    "action_net.bias": torch.full((1,), 0.5),
}


class Attack:
    """Pickles as a call of os.system that leaves a file behind."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


def tensors(content=WEIGHTS):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def write(path, **members):
    members = {"data": json.dumps({"use_sde": False}), "policy.pth": tensors()} | members
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(name, content)
    return path


def test_pickled_settings_are_never_decoded(tmp_path):
    import base64

    trace = tmp_path / "ran"
    payload = base64.b64encode(pickle.dumps(Attack(trace))).decode()
    data = {"policy_class": {":type:": "x", ":serialized:": payload}, "policy_kwargs": {":serialized:": payload}}
    actor = load_sb3(write(tmp_path / "m.zip", data=json.dumps(data)), SPEC)
    assert float(actor.act({STATE: torch.zeros(1, 3)}, deterministic=True).action) == 0.5
    assert not trace.exists()


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: {"log_std": a}, lambda a: WEIGHTS | {"x": a}])
def test_weights_that_are_a_program_are_refused(wrap, tmp_path):
    trace = tmp_path / "ran"
    for raw in (tensors(wrap(Attack(trace))), pickle.dumps(wrap(Attack(trace)))):
        with pytest.raises(ConfigError, match="nothing in it was run"):
            load_sb3(write(tmp_path / "m.zip", **{"policy.pth": raw}), SPEC)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"policy.pth": None}, "not a zip of Stable-Baselines3"),
        ({"data": None}, "not a zip of Stable-Baselines3"),
        ({"data": "{"}, "cannot be read"),
        ({"data": "[1, 2]"}, "no JSON object"),
        ({"policy.pth": b"PK"}, "holds something other than tensors, or is damaged"),
        ({"policy.pth": tensors([1, 2])}, "not a dict of tensors"),
        ({"policy.pth": tensors({"w": torch.zeros(2)})}, r"no policy of PPO.*\['w'\]"),
        ({"policy.pth": tensors(WEIGHTS | {"pi_features_extractor.cnn.0.weight": torch.zeros(1)})}, "MlpPolicy"),
        ({"data": json.dumps({"policy_kwargs": {"activation_fn": "<class 'x.activation.Evil'>"}})}, "`evil`"),
    ],
)
def test_damaged_and_foreign_zips_are_refused(members, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load_sb3(write(tmp_path / "m.zip", **members), SPEC)


def test_a_truncated_zip_and_one_with_stray_paths(tmp_path):
    whole = write(tmp_path / "m.zip", **{"../../escape": b"x", "/etc/escape": b"x"})
    load_sb3(whole, SPEC)  # only two members are ever looked at, and nothing is extracted
    assert not (tmp_path.parent / "escape").exists() and not os.path.exists("/etc/escape")  # noqa: PTH110
    (tmp_path / "half.zip").write_bytes(whole.read_bytes()[:200])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_sb3(tmp_path / "half.zip", SPEC)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("policies.sb3.MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"100,000 bytes; at most 1,000"):
        load_sb3(write(tmp_path / "m.zip", data="0" * 100_000), SPEC)


# --- vecnormalize.pkl ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
def test_a_program_among_statistics_does_not_run(protocol, tmp_path):
    path, trace = tmp_path / "v.pkl", tmp_path / "ran"
    for content in (Attack(trace), {"obs_rms": Attack(trace)}, [Attack(trace)]):
        path.write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(ConfigError, match="Nothing in it was run"):
            read_vecnormalize(path)
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"hello", b"\x80\x04}.", pickle.dumps(np.zeros(3))])
def test_other_files_are_no_statistics(content, tmp_path):
    path = tmp_path / "v.pkl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="Nothing in it was run"):
        read_vecnormalize(path)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_real_statistics_are_read_from_every_protocol(protocol, tmp_path):
    pytest.importorskip("stable_baselines3")
    import gymnasium
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    env: Any = VecNormalize(DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")]), clip_obs=5.0)
    env.reset()
    for _ in range(20):
        env.step([env.action_space.sample()])
    path = tmp_path / "v.pkl"
    path.write_bytes(pickle.dumps(env, protocol))
    statistics = read_vecnormalize(path)
    np.testing.assert_array_equal(statistics.mean, env.obs_rms.mean)
    np.testing.assert_array_equal(statistics.var, env.obs_rms.var)
    assert (statistics.clip, statistics.epsilon) == (5.0, env.epsilon)


def test_a_huge_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("policies.sb3_vecnormalize.MAX_BYTES", 10)
    (tmp_path / "v.pkl").write_bytes(b"0" * 11)
    with pytest.raises(ConfigError, match="11 bytes"):
        read_vecnormalize(tmp_path / "v.pkl")
