"""Whether kernels run in Triton's interpreter."""

import os

# There they are plain Python, and a constexpr is just its value.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
