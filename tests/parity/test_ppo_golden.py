# SPDX-License-Identifier: Apache-2.0
"""Advantages and losses against numbers from official implementations (sources and commits inside the files)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from robo_rl.functional import losses
from robo_rl.functional.advantages import gae

GOLDEN = Path(__file__).parents[1] / "golden"


def _load(name):
    return json.loads((GOLDEN / name).read_text())


def _tensor(x):
    x = np.asarray(x)  # float64, where torch.tensor would round to float32
    return torch.from_numpy(x)


def test_gae_equals_the_golden_numbers():
    data = _load("01_gae.json")
    i, out = data["inputs"], data["outputs"]
    value = _tensor(i["values"])
    ended = _tensor(i["terminated"]) | _tensor(i["truncated"])
    following = torch.cat([value[1:], _tensor(i["value_after_rollout"])[None]])
    next_value = torch.where(ended, _tensor(i["final_obs_value"]), following)
    advantage, value_target = gae(
        _tensor(i["rewards"]),
        value,
        next_value,
        _tensor(i["terminated"]),
        _tensor(i["truncated"]),
        i["gamma"],
        i["lambda"],
    )
    torch.testing.assert_close(advantage, _tensor(out["advantages"]), rtol=0, atol=1e-12)
    torch.testing.assert_close(value_target, _tensor(out["returns"]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("case", "clip_high", "dual_clip"),
    [("clip0.2", 0.2, None), ("clip0.2_dual3", 0.2, 3.0), ("clip0.2/0.28_dual3", 0.28, 3.0)],
)
def test_surrogate_equals_the_golden_numbers(case, clip_high, dual_clip, masked):
    data = _load("03_ppo_losses.json")
    i, out = data["inputs"], data["outputs"][f"{case}|masked={masked}"]
    log_prob = _tensor(i["logprobs"]).requires_grad_()
    mask = torch.tensor(i["loss_mask"]).bool() if masked else torch.ones_like(log_prob, dtype=torch.bool)
    log_ratio = log_prob - _tensor(i["old_logprobs"])
    loss = losses.clipped_surrogate(log_ratio, _tensor(i["advantages"]), 0.2, clip_high, dual_clip)
    mean = loss[mask].mean()
    assert float(mean.detach()) == pytest.approx(out["float64"]["loss"], abs=1e-12)
    assert float(losses.kl_k3(log_ratio.detach())[mask].mean()) == pytest.approx(out["float64"]["k3"], abs=1e-12)
    mean.backward()
    torch.testing.assert_close(log_prob.grad, _tensor(out["ref_grad_wrt_logprob"]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("masked", [True, False])
def test_value_loss_equals_the_golden_numbers(masked):
    data = _load("03_ppo_losses.json")
    i, out = data["inputs"], data["outputs"][f"value_clip0.2_huber10|masked={masked}"]
    loss = losses.value_loss(_tensor(i["values"]), _tensor(i["returns"]), _tensor(i["prev_values"]), 0.2, 10.0)
    mask = torch.tensor(i["loss_mask"]).bool() if masked else torch.ones_like(loss, dtype=torch.bool)
    assert float(loss[mask].mean()) == pytest.approx(out["float64_loss"], abs=1e-9)
