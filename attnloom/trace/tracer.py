"""From a user's score_mod or mask_mod to a BoundProgram.

The mod is called with Symbols, tensors without data. A mode sees every torch function that it
calls: functions of Symbols are lowered to IR by the table in `torch_ops.py`; functions of captured
tensors and numbers alone run at once, under autograd, and their result is a captured tensor.
Python control flow on a Symbol asks for its truth; the mod is then run once for each combination
of answers and the results are merged by condition.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attnloom.errors import TraceError
from attnloom.ir.node import BoundProgram, DType
from attnloom.trace import captures, indexing, messages, randomness
from attnloom.trace.context import Kind, Trace
from attnloom.trace.elementwise import to_bool, to_dtype
from attnloom.trace.failures import explained
from attnloom.trace.symbols import Array, NumberProxy, Symbol
from attnloom.trace.torch_ops import LOWERINGS, function_name

_ARGUMENTS = {
    "score_mod": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask_mod": ("b", "h", "q_idx", "kv_idx"),
}
_POSITIONS = ("b", "h", "q", "kv")
# Questions about a captured tensor whose answers the fast path compares by itself, and sizes,
# which it compares when a trace has read them.
_TYPE_QUESTIONS = frozenset(
    "get:dtype get:device get:ndim get:requires_grad get:layout get:is_cuda get:is_cpu dim "
    "ndimension is_floating_point is_complex get:is_sparse get:is_nested".split()
)
_SIZE_QUESTIONS = frozenset("get:shape size numel nelement __len__".split())


def trace_score(
    score_mod: Callable[..., Any], score_dtype: DType, device: torch.device
) -> BoundProgram:
    """Trace `score_mod(score, b, h, q_idx, kv_idx)`.

    A mod that was traced before is recognised by its code and what it captures, in microseconds.

    Args:
        score_mod: any callable; torch functions, Python arithmetic and control flow on scalars.
            It may capture tensors, of any stride, and Python numbers. Half-precision captures are
            read as float32.
        score_dtype: F32, or F64 for float64 inputs.
        device: where the inputs are; captured tensors must be there too.
    Returns:
        One output of `score_dtype`. Captured tensors that require grad are differentiable if grad
        mode is on. Numbers are run-time arguments.
    Raises:
        TraceError: the mod does something that has no place inside a kernel.
    """
    run = _beside_graph if torch.compiler.is_dynamo_compiling() else captures.traced
    return run("score_mod", score_mod, score_dtype, device, _trace)


def trace_mask(mask_mod: Callable[..., Any], device: torch.device) -> BoundProgram:
    """Trace `mask_mod(b, h, q_idx, kv_idx)`; as `trace_score`, with one BOOL output and without
    gradients. Python bools and numbers are accepted as results, by their truth.

    Raises:
        TraceError: the mod does something that has no place inside a kernel, or returns no bool.
    """
    run = _beside_graph if torch.compiler.is_dynamo_compiling() else captures.traced
    return run("mask_mod", mask_mod, DType.F32, device, _trace)


# Dynamo must not look into a trace: it would take the mod's Symbols for tensors of its graph.
_beside_graph = torch._disable_dynamo(captures.traced)


def _trace(
    kind: Kind, mod: Callable[..., Any], score_dtype: DType, device: torch.device
) -> tuple[BoundProgram, Trace]:
    """A full trace: every path of the mod, merged."""
    trace = Trace(kind, mod, score_dtype, device)
    trace.generators = randomness.sources(mod)
    _check_signature(trace)
    output = _explore(trace, ())
    program = trace.builder.finish(output)
    return BoundProgram(program, tuple(trace.tensors), tuple(trace.numbers)), trace


def _check_signature(trace: Trace) -> None:
    names = _ARGUMENTS[trace.kind]
    expected = f"{trace.kind}({', '.join(names)})"
    if not callable(trace.mod):
        raise TraceError(
            f"a {trace.kind} must be a function {expected}, got {type(trace.mod).__name__} "
            f"{trace.mod!r}; define one, or pass None."
        )
    try:
        signature = inspect.signature(trace.mod)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise trace.error(
            f"has the signature {signature}",
            f"it is called as {expected} ({error}). {_signature_advice(trace.kind, signature)}",
        ) from None


def _signature_advice(kind: Kind, signature: inspect.Signature) -> str:
    if kind == "score_mod" and len(signature.parameters) == len(_ARGUMENTS["mask_mod"]):
        return (
            "With four parameters it looks like a mask_mod: pass "
            "block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) instead. If it changes "
            "scores, add the parameter `score` in front."
        )
    return "Change its parameters, or bind the others with functools.partial."


def _explore(trace: Trace, decisions: tuple[bool, ...]) -> int:
    """Output node of all paths that begin with `decisions`."""
    output = _run(trace, decisions)
    taken, conditions, known = tuple(trace.taken), list(trace.conditions), dict(trace.known)
    if trace.kind == "mask_mod" and output in known:
        output = trace.builder.const(known[output], DType.BOOL)
    for place in reversed(range(len(decisions), len(taken))):
        other = _explore(trace, (*taken[:place], False))
        output = _merge(trace, conditions[place], output, other)
    return output


def _run(trace: Trace, decisions: tuple[bool, ...]) -> int:
    """Call the mod once; its result as a node of the program's output type."""
    trace.start_path(decisions)
    builder = trace.builder
    symbols = [Symbol.of(trace, Array.scalar(DType.I64, builder.input(p))) for p in _POSITIONS]
    if trace.kind == "score_mod":
        score = builder.input("score", trace.score_dtype)
        symbols.insert(0, Symbol.of(trace, Array.scalar(trace.score_dtype, score)))
    trace.base_frame = sys._getframe()
    states = [source.state() for source in trace.generators]
    try:
        with _Mode(trace):
            result = trace.mod(*symbols)
    except Exception as error:
        # torch's operators turn a TypeError, which a TraceError is, into "unsupported operand".
        if trace.failure is not None and error is not trace.failure:
            raise trace.failure from None
        if isinstance(error, AssertionError) and trace.taken:
            raise trace.error(
                "asserts a traced condition", "kernels cannot raise. Check it outside."
            ) from None
        if isinstance(error, KeyError) and any(type(key) is Symbol for key in error.args):
            raise trace.error(
                "looks a traced value up in a dictionary",
                "its value exists only inside the kernel. Stack the entries into one tensor "
                "outside, capture that and index it.",
            ) from None
        instead = explained(trace, error)
        if instead is not None:
            raise instead from error
        raise
    for source, state in zip(trace.generators, states, strict=True):
        if source.state() != state:
            raise trace.error(f"draws from {source.name}", messages.advice("rand"))
    if trace.failure is not None:  # swallowed, as by `x += y`, which torch then tries as x + y
        raise trace.failure
    try:
        return _output(trace, result)
    finally:
        trace.base_frame = None


def _output(trace: Trace, result: Any) -> int:
    """The returned value as a node: of the score's type, or BOOL."""
    if result is None:
        raise trace.error("returns None", "did you forget `return`?")
    number = type(result) is NumberProxy or isinstance(result, bool | int | float)
    if not number and not isinstance(result, torch.Tensor):
        raise trace.error(
            f"returns a {type(result).__name__}", f"it must return {_expected(trace.kind)}."
        )
    value = trace.operand(result)
    if isinstance(value, Array) and value.dims:
        raise trace.error(
            f"returns a tensor of shape {list(value.shape)}",
            f"{messages.ONE_AT_A_TIME} and returns {_expected(trace.kind)}. Index it down to a "
            "scalar, or reduce it.",
        )
    if trace.kind == "score_mod":
        if trace.dtype_of(value) is DType.BOOL:
            raise trace.error(
                "returns a bool",
                "pass it as a mask_mod to create_block_mask, or return "
                'torch.where(condition, score, float("-inf")).',
            )
        return to_dtype(trace, value, trace.score_dtype).at()
    if isinstance(value, Array) and value.dtype is not DType.BOOL:
        truth = trace.known.get(to_bool(trace, value).at())
        if truth is None:
            raise trace.error(
                f"returns {str(value.dtype.torch).removeprefix('torch.')}",
                "a mask_mod must return a bool. Compare explicitly, for example `!= 0`.",
            )
        return trace.builder.const(truth, DType.BOOL)
    return to_bool(trace, value).at()


def _expected(kind: Kind) -> str:
    return "the changed score, a scalar" if kind == "score_mod" else "one bool"


def _merge(trace: Trace, condition: int, yes: int, no: int) -> int:
    """`yes if condition else no`, by logic alone where an arm of a mask is constant."""
    b = trace.builder
    if yes == no:
        return yes
    if trace.kind == "mask_mod":
        arms = [b.nodes[n].attr if b.nodes[n].op == "const" else None for n in (yes, no)]
        if arms == [True, False]:
            return condition
        if arms == [False, True]:
            return b.node("not", condition)
        if arms[0] is True:
            return b.node("or", condition, no)
        if arms[1] is False:
            return b.node("and", condition, yes)
        if arms[0] is False:
            return b.node("and", b.node("not", condition), no)
        if arms[1] is True:
            return b.node("or", b.node("not", condition), yes)
    return b.node("where", condition, yes, no)


class _Mode(TorchFunctionMode):
    """Sees every torch function that the mod calls."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _holds(args, Symbol) or _holds(kwargs.values(), Symbol):
            return _lower(self.trace, func, args, kwargs)
        return _run_on_host(self.trace, func, args, kwargs)


def _holds(values: Any, wanted: type) -> bool:
    return any(
        type(v) is wanted or (type(v) in (tuple, list, slice) and _holds(_items(v), wanted))
        for v in values
    )


def _items(value: Any) -> Any:
    return (value.start, value.stop, value.step) if type(value) is slice else value


def _lower(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function of traced values."""
    name = function_name(func)
    lowering = LOWERINGS.get(name)
    for option in ("out", "inplace"):
        if option in kwargs and kwargs[option] is not None and kwargs[option] is not False:
            raise trace.error(
                f"calls {messages.display(func)} with {option}=",
                "a traced value cannot be changed in place. Use the result.",
            )
    if lowering is None:
        raise trace.error(messages.phrase(func), messages.advice(name))
    if torch.is_grad_enabled() is not trace.grad_mode:
        raise trace.error(
            "computes under another grad mode than its caller's (torch.no_grad() in the mod)",
            "kernels differentiate the whole mod. Detach captured tensors outside instead.",
        )
    kwargs = {k: v for k, v in kwargs.items() if k not in ("out", "inplace")}
    try:
        result = lowering(trace, *args, **kwargs)
    except TypeError as error:
        if isinstance(error, TraceError) or error.__traceback__.tb_next is not None:  # type: ignore
            raise
        raise trace.error(
            f"calls {messages.display(func)} with arguments that have no fused form",
            f"{str(error).split('()')[-1].strip()}. Use its basic form.",
        ) from None
    return _wrap(trace, result)


def _wrap(trace: Trace, result: Any) -> Any:
    if type(result) is Array:
        return Symbol.of(trace, result)
    return tuple(_wrap(trace, r) for r in result) if type(result) is list else result


def _run_on_host(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function of captured tensors and numbers runs here and now."""
    name = function_name(func)
    if name in messages.RANDOM and "empty" not in name:
        raise trace.error(f"calls {messages.display(func)}", messages.advice(name))
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        raise trace.error(
            f"changes a captured tensor by {messages.display(func)}",
            "a mod must not have side effects. Change it outside.",
        )
    if name in _SIZE_QUESTIONS:
        trace.reads_sizes = True
    elif name not in _TYPE_QUESTIONS:
        trace.reads_host = True
    if _holds(args, NumberProxy) or _holds(kwargs.values(), NumberProxy):
        args, kwargs = _plain(args), {k: _plain(v) for k, v in kwargs.items()}
    try:
        return func(*args, **kwargs)
    except IndexError:
        if name == "__getitem__":
            indexing.check_host_index(trace, *args)
        raise


def _plain(value: Any) -> Any:
    if type(value) is NumberProxy:
        return value.observe()
    if type(value) in (tuple, list):
        return type(value)(_plain(v) for v in value)
    if type(value) is slice:
        return slice(*(_plain(v) for v in _items(value)))
    return value
