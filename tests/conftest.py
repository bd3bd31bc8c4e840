"""What every test runs under."""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors on shared cores: more threads only wait for each other

# No example fails for the time that it took: the machine may be busy. In CI everybody draws the same ones.
settings.register_profile(
    "trilane", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("trilane")
