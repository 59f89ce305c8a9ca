"""Every case against every peer, in one process: `python -m benchmarks.run --help`."""
