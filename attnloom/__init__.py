"""attnloom: FlexAttention as an ordinary function, fused on the first eager call.

A drop-in for torch.nn.attention.flex_attention: the same names, arguments and return forms.
"""

from attnloom.api.attention import AuxOutput, AuxRequest, flex_attention
from attnloom.api.jagged import create_nested_block_mask
from attnloom.api.masks import (
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)
from attnloom.api.options import FlexKernelOptions
from attnloom.api.parallel import balanced_rows, merge_attention
from attnloom.block_mask import BlockMask
from attnloom.errors import (
    AttnloomError,
    CacheError,
    CompileError,
    DeviceError,
    DtypeError,
    ModError,
    OptionError,
    OutOfPagesError,
    ShapeError,
    TraceError,
    UnsupportedError,
)
from attnloom.masking.decode import DecodeMask
from attnloom.paged import PagedBatch, PagedKV, PagedKVCache, PageTable
from attnloom.stats import CompileStats, compile_stats, reset_compile_stats
from attnloom.tools import Check, Diagnosis, Explanation, check_mod, doctor, explain

__version__ = "0.1.0"

__all__ = [
    # attention and masks, named as in torch.nn.attention.flex_attention
    "flex_attention",
    "create_block_mask",
    "create_nested_block_mask",
    "create_mask",
    "BlockMask",
    "and_masks",
    "or_masks",
    "noop_mask",
    "AuxRequest",
    "AuxOutput",
    "FlexKernelOptions",
    # several processes
    "merge_attention",
    "balanced_rows",
    # caches
    "PagedKVCache",
    "PagedBatch",
    "PagedKV",
    "PageTable",
    "DecodeMask",
    # what the compiler did
    "CompileStats",
    "compile_stats",
    "reset_compile_stats",
    # tools, also as commands: attnloom explain, check, doctor
    "explain",
    "Explanation",
    "check_mod",
    "Check",
    "doctor",
    "Diagnosis",
    # errors
    "AttnloomError",
    "CacheError",
    "CompileError",
    "DeviceError",
    "DtypeError",
    "ModError",
    "OptionError",
    "OutOfPagesError",
    "ShapeError",
    "TraceError",
    "UnsupportedError",
]
