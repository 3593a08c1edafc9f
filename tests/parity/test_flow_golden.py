# SPDX-License-Identifier: Apache-2.0
"""Flow samplers against numbers from the official piRL implementation (source and commit inside the file)."""

import json
from pathlib import Path

import pytest
import torch

from robo_rl.functional import flow

DATA = json.loads((Path(__file__).parents[1] / "golden" / "02_pi_rl.json").read_text())
INPUTS, OUTPUTS = DATA["inputs"], DATA["outputs"]


def double(x):
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize("name", list(OUTPUTS["mean_std"]))
def test_every_step_of_every_sampler(name):
    sampler, steps, level = name.removeprefix("flow_").split("|")
    steps, level = int(steps[2:]), float(level[2:])
    x, v = double(INPUTS["x"]), double(INPUTS["v"])
    for row in OUTPUTS["mean_std"][name]:
        index = torch.full((len(x),), row["step"])
        mean, std = flow.denoise_step(x, v, index, steps, sampler, level)
        torch.testing.assert_close(mean, double(row["mean"]), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(std, torch.full_like(std, row["std"]), rtol=1e-6, atol=1e-6)


def test_learned_std():
    low, high = INPUTS["noise_range"]
    std = flow.learned_std(double(INPUTS["flow_noise_raw"]), low, high)
    torch.testing.assert_close(std, double(OUTPUTS["flow_noise_std_float64"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sampler", ["sde", "cps", "noise"])
@pytest.mark.parametrize("joint", [False, True])
def test_log_prob_terms(sampler, joint):
    i = INPUTS["logprob"]
    chains, velocity = double(i["chains[B,K+1,H,D]"]), double(i["velocity[B,K(step),H,D]"])
    rows, width = i["action_chunk"], i["action_env_dim"]
    std = flow.learned_std(torch.full_like(velocity[:, 0], i["flow_noise_head_raw"]), *INPUTS["noise_range"])
    expected = OUTPUTS["logprob"][f"flow_{sampler}|joint={joint}"]["logprob_terms_sliced_float64"]

    denoise_steps = chains.shape[1] - 1

    def terms(b, index):
        x, after = chains[b, index][None], chains[b, index + 1][None]
        learned = std[b][None] if sampler == "noise" else None
        mean, s = flow.denoise_step(
            x, velocity[b, index][None], torch.tensor([index]), denoise_steps, sampler, i["a"], learned
        )
        return flow.log_prob_terms(after, mean, s)[0, :rows, :width]

    for b in range(len(chains)):
        steps = range(denoise_steps) if joint else [i["denoise_index_non_joint"][b]]
        # Joint rows start with the initial noise, which cancels in every ratio.
        got = [flow.log_prob_terms(chains[b, 0], torch.zeros(()).double(), torch.ones(()).double())[:rows, :width]]
        got = got[: int(joint)] + [terms(b, k) for k in steps]
        torch.testing.assert_close(torch.stack(got), double(expected[b]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", INPUTS["K"])
def test_the_ode_on_a_linear_field(steps):
    field = INPUTS["linear_field"]
    a, b, c = (double(field[k]) for k in "Abc")
    x = double(field["noise"])
    for k in range(steps):
        t = flow.grid_time(torch.tensor([k]), steps).double()
        x, std = flow.denoise_step(x, x @ a.T + b * t + c, torch.full((len(x),), k), steps, "ode")
        assert not std.any()
    torch.testing.assert_close(
        x, double(OUTPUTS["ode_linear_field"][f"K={steps}"]["final_float64_euler"]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_hybrid_chain_walked_again(seed):
    """The official rollout's chain: exact Euler steps but for one, whose draw and log-prob are given."""
    out, field = OUTPUTS["hybrid_rollouts"][f"seed={seed}"], INPUTS["linear_field"]
    a, b, c = (double(field[k]) for k in "Abc")
    chains, noise = double(out["chains"]), [double(n) for n in out["noise_draws"]]
    steps, stochastic = chains.shape[1] - 1, out["python_random_draw"]
    x = chains[:, 0]
    for k in range(steps):
        index = torch.full((len(x),), k)
        v = x @ a.T + b * (1 - k / steps) + c
        mean, std = flow.denoise_step(x, v, index, steps, "sde" if k == stochastic else "ode", 0.5)
        if k == stochastic:
            log_prob = flow.log_prob_terms(chains[:, k + 1], mean, std)
            torch.testing.assert_close(log_prob, double(out["prev_logprobs"]), rtol=1e-5, atol=1e-5)
        x = mean + std * noise[k]
        torch.testing.assert_close(x, chains[:, k + 1], rtol=1e-5, atol=1e-5)


def test_annealing():
    for step, level in OUTPUTS["noise_anneal_[0.7,0.3,400]"].items():
        assert flow.anneal(0.7, 0.3, 400, int(step)) == pytest.approx(level)
