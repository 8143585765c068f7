"""One thread a test process: pytest runs a process a core, and two that each take every core wait for each other."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # read when torch and numpy are first imported, here and in every kernel
