# SPDX-License-Identifier: Apache-2.0
"""Measure speed and parity with the peers.

python launch/bench.py sim ppo --quick
python launch/bench.py ppo-parity --algo ours --seeds 0 --write
"""

import tyro

from robo_rl.app.bench import BenchConfig, bench

if __name__ == "__main__":
    bench(tyro.cli(BenchConfig))
