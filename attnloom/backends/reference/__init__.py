"""Dense attention by plain torch operators: the oracle that every other backend is tested against.

It calls the user's own function and shares nothing with the tracer or the expression graph, so
that a mistake there cannot repeat itself here.
"""

from attnloom.backends.reference.attention import (
    ReferenceOutput,
    reference_attention,
    reference_forward,
)
from attnloom.backends.reference.lanes import evaluate_lanes
from attnloom.backends.reference.paged import paged_forward, paged_reference

__all__ = [
    "ReferenceOutput",
    "evaluate_lanes",
    "paged_forward",
    "paged_reference",
    "reference_attention",
    "reference_forward",
]
