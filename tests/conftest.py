"""What every test runs under."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors on shared cores: more threads only wait for each other
