# SPDX-License-Identifier: Apache-2.0
"""Measure speed and parity with the peers. Thin over `robo_rl.app`; `--help` explains."""

import sys

from robo_rl.app.cli import bench

if __name__ == "__main__":
    sys.exit(bench())
