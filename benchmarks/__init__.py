"""Every case against every peer, in one process: `python -m benchmarks.run --help`."""

import os

# Forms of first calls are timed by the suite of first calls alone.
os.environ.setdefault("ATTNLOOM_QUICK_START", "0")
