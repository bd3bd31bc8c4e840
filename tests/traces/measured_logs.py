"""The two measured logs that the stored fits are of; they are input data, and not everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

LOGS = Path(__file__).parents[3] / "shared" / "traces" / "route_trace_v1"
needs_logs = pytest.mark.skipif(not LOGS.is_dir(), reason=f"the measured logs are not here: {LOGS}")
