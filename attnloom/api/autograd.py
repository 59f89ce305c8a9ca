"""How a planned call meets autograd, functorch transforms and dispatch modes.

- no gradient wanted: the backend is called directly
- reverse mode: an autograd.Function that saves query, key, value, captured tensors, out, lse and,
  where nothing but the backward looks on, what else the backend knows of each row
- reverse mode of the backward: `composite.second_order`
- forward mode, alone or under any other transform: `composite.attend`
- torch.func.grad, vjp, vmap: the same formulas with setup_context; vmap maps one item at a time
- any dispatch mode or tensor subclass (export, make_fx, FakeTensor, selective checkpointing): the
  registered operators of `operators.py`, so that the mode sees one named operator
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from attnloom.api import autocast, composite, operators
from attnloom.api.launch import Launch, flat_gradients
from attnloom.errors import DtypeError

Tensors = tuple[torch.Tensor, ...]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tensors]
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
transforms_active = torch._C._are_functorch_transforms_active
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def num_dispatch_modes() -> int:
    """Dispatch modes that look on; those of tracers before dispatch count as one."""
    return torch._C._len_torch_dispatch_stack() or int(_is_included(_PRE_DISPATCH))


def attention(
    launch: Launch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tensors: Tensors,
    want_max_scores: bool,
) -> Outputs:
    """Run a launch differentiably.

    Args:
        tensors: captured tensors of the score program, then of the mask program.
    Returns:
        out, lse and max_scores (None unless wanted; never differentiable).
    """
    if forward_ad._current_level >= 0 and _has_tangent((query, key, value, *tensors)):
        return composite.attend(launch, query, key, value, tensors)
    if transforms_active():
        function: Any = _TransformedAttention
    elif _wants_grad(query, key, value, tensors):
        function = _EagerAttention
    else:
        return _run_forward(launch, query, key, value, tensors, want_max_scores)
    outputs = function.apply(launch, want_max_scores, query, key, value, *tensors)
    return outputs if want_max_scores else (*outputs, None)


def attention_again(
    launch: Launch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tensors: Tensors,
    want_max_scores: bool,
) -> Outputs:
    """As `attention`, of a launch that `repeats.find` gave: nobody looks on, and no operator runs
    that autocast would change."""
    again = launch.again
    run = None if again is None else again.forwards.get((want_max_scores, False))
    if run is not None and forward_ad._current_level < 0:
        grad = _wants_grad(query, key, value, tensors)
        result = None if grad else run(query, key, value, tensors)
        if result is not None:
            return result.out, result.lse, result.max_scores
    return attention(launch, query, key, value, tensors, want_max_scores)


def _wants_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tensors: Tensors
) -> bool:
    return torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or any([x.requires_grad for x in tensors])  # noqa: C419 - a list is faster
    )


def _has_tangent(inputs: Tensors) -> bool:
    # Inside functorch the level that carries the tangent may be wrapped by others: assume one.
    return transforms_active() or any(forward_ad.unpack_dual(x).tangent is not None for x in inputs)


def _needs_operators(query: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a dispatch mode or a tensor subclass has to see the registered operators."""
    if num_dispatch_modes() or query.is_meta or type(query) not in PLAIN_TYPES:
        return True
    for x in others:  # noqa: SIM110 - a generator would double the time of this
        if type(x) not in PLAIN_TYPES:
            return True
    return False


def _run_forward(
    launch: Launch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tensors: Tensors,
    want_max_scores: bool,
) -> Outputs:
    return _outputs_and_state(launch, (query, key, value, tensors), want_max_scores, False)[0]


def _outputs_and_state(
    launch: Launch, inputs: Inputs, want_max_scores: bool, for_backward: bool
) -> tuple[Outputs, torch.Tensor | None]:
    """The outputs of a forward, and its row_state if it has one; operators hand on none."""
    query, key, value, tensors = inputs
    if _needs_operators(query, key, value, *tensors):
        return operators.call_forward(launch, *inputs, want_max_scores), None
    if autocast.is_on(query):
        with autocast.switched_off(query):
            result = launch.forward(*inputs, want_max_scores, for_backward)
    else:
        result = launch.forward(*inputs, want_max_scores, for_backward)
    outputs = (result.out, result.lse, result.max_scores if want_max_scores else None)
    return outputs, result.row_state


def _run_backward(
    launch: Launch,
    inputs: Inputs,
    saved: Tensors,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Tensors:
    """dq, dk, dv and the gradients of launch.grad_slots(); saved: out, lse, perhaps row_state."""
    query, key, value, tensors = inputs
    if _needs_operators(query, key, value, dout, *tensors):
        return operators.call_backward(launch, inputs, saved[:2], dout, dlse)
    if autocast.is_on(query):
        with autocast.switched_off(query):
            grads = launch.backward(query, key, value, tensors, saved, dout, dlse)
    else:
        grads = launch.backward(query, key, value, tensors, saved, dout, dlse)
    return flat_gradients(launch, grads)


def _save(
    ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...], row_state: torch.Tensor | None
) -> None:
    ctx.launch = inputs[0]
    ctx.set_materialize_grads(False)
    saved = (*inputs[2:], *outputs[:2])
    ctx.dtypes = [t.dtype for t in saved]
    ctx.save_for_backward(*saved, row_state)
    if len(outputs) == 3:
        ctx.mark_non_differentiable(outputs[2])


def _forward(launch: Launch, want_max_scores: bool, *inputs: torch.Tensor) -> Tensors:
    query, key, value = inputs[:3]
    outputs = _run_forward(launch, query, key, value, inputs[3:], want_max_scores)
    return outputs if outputs[2] is not None else outputs[:2]  # type: ignore[return-value]


def _backward(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: Any
) -> tuple[Any, ...]:
    launch: Launch = ctx.launch
    *saved, row_state = ctx.saved_tensors
    if [t.dtype for t in saved] != ctx.dtypes:
        raise DtypeError(
            f"saved_tensors_hooks gave back tensors of {[str(t.dtype) for t in saved]} that were "
            f"saved as {[str(dtype) for dtype in ctx.dtypes]}. Let unpack_hook return the dtype "
            "that pack_hook was given."
        )
    query, key, value, *tensors, out, lse = saved
    if dout is None and dlse is None:
        return (None,) * (5 + len(tensors))
    if dout is None:
        dout = torch.zeros_like(out)
    if transforms_active() or torch.is_grad_enabled():
        # The gradients are wanted as differentiable functions of what they depend on.
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        grads = _gradient(launch, query, key, value, *tensors, out, lse, dout, dlse)
    else:
        inputs = (query, key, value, tuple(tensors))
        rows = (out, lse) if row_state is None else (out, lse, row_state.contiguous())
        grads = _run_backward(launch, inputs, rows, dout, dlse)
    return (None, None, *_by_input(launch, len(tensors), grads))


def _gradient(launch: Launch, *inputs: torch.Tensor) -> Tensors:
    """The backward as a differentiable function; inputs as for _gradient_forward."""
    function: Any = _TransformedGradient if transforms_active() else _EagerGradient
    return function.apply(launch, *inputs)


def _by_input(launch: Launch, num_tensors: int, grads: Tensors) -> tuple[Any, ...]:
    """Gradients in the order of query, key, value, *tensors; None where there is none."""
    captured: list[torch.Tensor | None] = [None] * num_tensors
    for slot, grad in zip(launch.grad_slots(), grads[3:], strict=True):
        captured[slot] = grad
    return (*grads[:3], *captured)


def _gradient_forward(launch: Launch, *inputs: torch.Tensor) -> Tensors:
    query, key, value, *tensors, out, lse, dout, dlse = inputs
    return _run_backward(launch, (query, key, value, tuple(tensors)), (out, lse), dout, dlse)


def _gradient_save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.launch = inputs[0]
    # out and lse are functions of the other inputs, recomputed where needed.
    ctx.save_for_backward(*inputs[1:-4], *inputs[-2:])


def _gradient_backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
    launch: Launch = ctx.launch
    query, key, value, *tensors, dout, dlse = ctx.saved_tensors
    inputs = (query, key, value, tuple(tensors))
    gq, gk, gv, captured, gdout, gdlse = composite.second_order(
        launch, inputs, dout, dlse, cotangents
    )
    by_input = _by_input(launch, len(tensors), (gq, gk, gv, *captured))
    return (None, *by_input, None, None, gdout, gdlse)


def _map_items(
    apply: Callable[..., Tensors], info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Tensors, tuple[int, ...]]:
    """vmap by one call an item: exact for mods that read b and for mapped captured tensors."""
    items = []
    for i in range(info.batch_size):
        one = (x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True))
        items.append(apply(*one))
    stacked = tuple(torch.stack(parts) for parts in zip(*items, strict=True))
    return stacked, (0,) * len(stacked)


class _EagerAttention(torch.autograd.Function):
    """Reverse mode outside transforms; forward(ctx, ...) costs 11 us less than setup_context."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensors:
        launch, want_max_scores, query, key, value, *tensors = inputs
        tensors = tuple(tensors)
        outputs, row_state = _outputs_and_state(
            launch, (query, key, value, tensors), want_max_scores, True
        )
        shown = outputs if want_max_scores else outputs[:2]
        _save(ctx, inputs, shown, row_state)
        return shown  # type: ignore[return-value]

    backward = staticmethod(_backward)


class _TransformedAttention(torch.autograd.Function):
    """The same under torch.func transforms."""

    forward = staticmethod(_forward)
    backward = staticmethod(_backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _save(ctx, inputs, output, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _map_items(_apply_attention, info, in_dims, *args)


class _EagerGradient(torch.autograd.Function):
    """The backward as a differentiable function, for create_graph=True."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensors:
        _gradient_save(ctx, inputs)
        return _gradient_forward(*inputs)

    backward = staticmethod(_gradient_backward)


class _TransformedGradient(torch.autograd.Function):
    """The same under torch.func transforms."""

    forward = staticmethod(_gradient_forward)
    backward = staticmethod(_gradient_backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _gradient_save(ctx, inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _map_items(_gradient, info, in_dims, *args)


def _apply_attention(launch: Launch, want_max_scores: bool, *inputs: torch.Tensor) -> Tensors:
    query, key, value = inputs[:3]
    out, lse, max_scores = attention(launch, query, key, value, inputs[3:], want_max_scores)
    return (out, lse) if max_scores is None else (out, lse, max_scores)


def _operator_forward(*args: Any) -> Tensors:
    """attnloom::flex_forward at the Autograd key."""
    *common, want_max_scores = args
    launch = operators.launch_of(*common)
    query, key, value = common[:3]
    out, lse, max_scores = attention(launch, query, key, value, tuple(common[5]), want_max_scores)
    return out, lse, lse.new_empty(0) if max_scores is None else max_scores


def _operator_backward(*args: Any) -> tuple[Any, ...]:
    """attnloom::flex_backward at the Autograd key."""
    *common, out, lse, dout, dlse = args
    launch = operators.launch_of(*common)
    query, key, value, tensors = *common[:3], tuple(common[5])
    inputs = (query, key, value, *tensors, dout)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        grads = _gradient(launch, query, key, value, *tensors, out, lse, dout, dlse)
    else:
        grads = _run_backward(launch, (query, key, value, tensors), (out, lse), dout, dlse)
    dq, dk, dv, *captured = grads
    return dq, dk, dv, list(captured)


operators.library.impl("flex_forward", _operator_forward, "Autograd")
operators.library.impl("flex_backward", _operator_backward, "Autograd")
