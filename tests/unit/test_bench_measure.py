# SPDX-License-Identifier: Apache-2.0
"""The measuring itself: CPU time of children counts, contenders take turns, a ratio is the median of paired turns."""

import subprocess
import sys
import time

import pytest

from robo_rl.app import bench, bench_parity
from robo_rl.app.cpu import cpu_seconds


def test_cpu_seconds_counts_a_busy_child_but_not_a_sleeping_one():
    code = "import sys, time\nend = time.process_time() + float(sys.argv[1])\nwhile time.process_time() < end: pass\n"
    code += "print('done', flush=True)\ntime.sleep(60)"
    for work, low, high in ((0.5, 0.45, 2.0), (0.0, 0.0, 0.45)):
        before = cpu_seconds()
        child = subprocess.Popen([sys.executable, "-c", code, str(work)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        used = cpu_seconds() - before
        child.kill()
        child.wait()
        assert low <= used <= high


def test_contenders_take_turns_and_are_closed():
    order: list[str] = []

    def contender(name: str, steps: int) -> bench.Contender:
        def advance() -> int:
            end = time.process_time() + 0.05  # each call costs the same CPU time
            while time.process_time() < end:
                pass
            order.append(name)
            return steps

        return bench.Contender(name, advance, lambda: order.append(f"close {name}"))

    config = bench.BenchConfig(rows=("sim",), repeats=3, seconds=0.01)
    rates = bench.interleave([contender("ours", 300), contender("peer", 100)], config)
    assert order == ["ours", "peer"] * 4 + ["close ours", "close peer"]  # a first call, then three turns
    row = bench.ratio_row("id", "claim", rates, "peer", target=2.0)
    assert row.holds and 2.0 < float(row.measured.split()[0]) < 4.5


def test_ratio_pairs_turns():
    # The machine was twice as fast in the second turn: paired ratios are 2, 2, 3; the ratio of medians would be 3.
    rates = {"ours": bench.Rates([20, 40, 30]), "peer": bench.Rates([10, 20, 10])}
    row = bench.ratio_row("id", "claim", rates, "peer", target=2.5)
    assert row.measured.startswith("2.00 (2.00 to 3.00)")
    assert row.holds is False


def test_welch_interval_of_a_worked_example():
    # a = 1..5: mean 3, variance 2.5; b = 2, 4, 6, 8, 10: mean 6, variance 10. Standard error sqrt(2.5/5 + 10/5)
    # = 1.5811;
    # degrees of freedom 2.5^2 / (0.5^2/4 + 2^2/4) = 5.882; t(0.975, 5.882) = 2.4586.
    low, high = bench_parity.welch_interval([1, 2, 3, 4, 5], [2, 4, 6, 8, 10])
    assert low == pytest.approx(-3 - 3.8874, abs=2e-3)
    assert high == pytest.approx(-3 + 3.8874, abs=2e-3)


def test_parity_holds_only_with_five_runs_each():
    def records(ours: list[float], theirs: list[float]) -> dict:
        both = [("ours", r) for r in ours] + [("sb3", r) for r in theirs]
        return {
            f"{algo}_{i}": {"algo": algo, "seed": i, "eval_return": r, "wall_s": 1.0, "cpu_s": 1.0}
            for i, (algo, r) in enumerate(both)
        }

    similar = [1000.0, 1100.0, 1200.0, 900.0, 1050.0]
    assert bench_parity.compare(records(similar, similar)).holds is True
    assert bench_parity.compare(records(similar[:4], similar)).holds is None
    assert bench_parity.compare(records(similar, [2 * r for r in similar])).holds is False
    # The interval covers 0 (the runs scatter), but the mean is below 0.85 of the peer's.
    assert bench_parity.compare(records([0.0, 100.0, 2000.0, 50.0, 900.0], similar)).holds is False
