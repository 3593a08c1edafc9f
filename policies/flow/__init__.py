# SPDX-License-Identifier: Apache-2.0
"""Flow-matching policies: `policy.py` acts and is judged, `networks.py` holds the velocity networks."""
