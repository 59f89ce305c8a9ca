"""A CUDA fault fails its own test only, as among the kernels' tests."""

from tests.kernels.conftest import _stops_at_a_fault

__all__ = ["_stops_at_a_fault"]
