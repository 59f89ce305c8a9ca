"""The registered operators: what torch's own tracing tools see of a call."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from attnloom import create_block_mask, flex_attention
from attnloom.api import structure
from attnloom.api.launch import Launch
from attnloom.errors import OptionError
from tests.api.mods import causal, normal, qkv, slope_bias, soft_cap
from tests.api.test_autograd import attend, slopes

FORWARD = torch.ops.attnloom.flex_forward.default
BACKWARD = torch.ops.attnloom.flex_backward.default


def targets(graph_module) -> list[object]:
    nodes = graph_module.graph.nodes
    return [n.target for n in nodes if n.op == "call_function" and "attnloom" in str(n.target)]


def gradients(q, k, v, slope, mask):
    out, lse = attend(q, k, v, slope, mask)
    return torch.autograd.grad(out.sin().sum() + lse.sum(), (q, k, v, slope))


@pytest.fixture
def mask():
    return create_block_mask(causal, None, None, 5, 7, device="cpu")


def test_make_fx_sees_two_operators(mask):
    inputs = (*qkv(requires_grad=True), slopes())
    graph = make_fx(functools.partial(gradients, mask=mask))(*inputs)
    assert targets(graph) == [FORWARD, BACKWARD]
    other = tuple(x.detach().mul(0.5).requires_grad_() for x in inputs)
    for a, b in zip(graph(*other), gradients(*other, mask), strict=True):
        torch.testing.assert_close(a, b)


def recorded_arguments(mask):
    """Operator -> what a forward and a backward call it with."""
    inputs = (*qkv(requires_grad=True), slopes())
    graph = make_fx(functools.partial(gradients, mask=mask), tracing_mode="real")(*inputs)
    recorded = {}

    class Record(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            recorded[target] = args
            return super().call_function(target, args, kwargs)

    Record(graph).run(*inputs)
    return {
        target: tree_map_only(torch.Tensor, torch.Tensor.detach, recorded[target])
        for target in (FORWARD, BACKWARD)
    }


CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def test_opcheck(mask):
    for target, args in recorded_arguments(mask).items():
        torch.library.opcheck(target, args, test_utils=CHECKS)
        args[0].requires_grad_()
        # Tracing second derivatives takes longer than all the rest.
        torch.library.opcheck(target, args, test_utils=CHECKS[: 4 if target is FORWARD else 3])


@pytest.mark.long
def test_opcheck_of_second_derivatives(mask):
    args = recorded_arguments(mask)[BACKWARD]
    args[0].requires_grad_()
    torch.library.opcheck(BACKWARD, args, test_utils=CHECKS[3])


def test_fake_tensors_and_meta_device(mask):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = qkv(dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        out = flex_attention(*fakes, block_mask=mask, enable_gqa=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "cpu")
    metas = [x.to("meta") for x in (q, k, v)]
    assert flex_attention(*metas, enable_gqa=True).shape == q.shape


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.linspace(0.1, 0.4, 4))
        self.mask = create_block_mask(causal, None, None, 5, 7, device="cpu")

    def forward(self, q, k, v):
        return flex_attention(q, k, v, slope_bias(self.slope), self.mask, enable_gqa=True)


def test_export():
    inputs = qkv(dtype=torch.float32)
    layer = Layer()
    program = torch.export.export(layer, inputs, strict=False)
    assert targets(program.graph_module) == [FORWARD]
    torch.testing.assert_close(program.module()(*inputs), layer(*inputs))


def test_export_survives_saving(tmp_path):
    inputs = qkv(dtype=torch.float32)
    layer = Layer()
    path = tmp_path / "layer.pt2"
    torch.export.save(torch.export.export(layer, inputs, strict=False), path)
    torch.testing.assert_close(torch.export.load(path).module()(*inputs), layer(*inputs))


def test_export_with_a_dynamic_length_and_a_number():
    class Capped(torch.nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, soft_cap(2.5), enable_gqa=True)

    length = torch.export.Dim("length", min=2, max=64)
    shapes = ({2: length}, None, None)
    program = torch.export.export(
        Capped(), qkv(dtype=torch.float32), dynamic_shapes=shapes, strict=False
    )
    other = qkv(lengths=(9, 7), dtype=torch.float32)
    torch.testing.assert_close(program.module()(*other), Capped()(*other))


def test_an_exported_module_compiles_in_one_graph():
    inputs = qkv(dtype=torch.float32)
    layer = Layer()
    module = torch.export.export(layer, inputs, strict=False).module()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), layer(*inputs))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_breaks_the_graph_and_stays_right(backend, mask):
    inputs = (*qkv(requires_grad=True), slopes())

    def step(q, k, v, slope):
        out, lse = attend(q * 2, k, v, slope, mask)
        return out.sin().sum() + lse.sum()

    got = torch.autograd.grad(torch.compile(step, backend=backend)(*inputs), inputs)
    for a, b in zip(got, torch.autograd.grad(step(*inputs), inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpointing_can_name_the_operator(save, mask, monkeypatch):
    inputs = (*qkv(requires_grad=True), slopes())
    runs = []
    forward = Launch.forward

    def counted(*args):
        runs.append(args)
        return forward(*args)

    monkeypatch.setattr(Launch, "forward", counted)

    def policy(context, op, *args, **kwargs):
        if op is FORWARD:
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def step(*x):
        return attend(*x, mask)[0].sin().sum()

    got = torch.autograd.grad(
        checkpoint(
            step,
            *inputs,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
        ),
        inputs,
    )
    assert len(runs) == (1 if save else 2)
    for a, b in zip(got, torch.autograd.grad(step(*inputs), inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_operator_called_directly_is_differentiable(mask):
    inputs = (*qkv(requires_grad=True), slopes())
    graph = make_fx(lambda *x: attend(*x, mask))(*inputs)
    out, lse = graph(*inputs)
    got = torch.autograd.grad(out.sin().sum() + lse.sum(), inputs)
    for a, b in zip(got, gradients(*inputs, mask), strict=True):
        torch.testing.assert_close(a, b)


def test_structure_text_round_trip():
    from attnloom.ir.node import DType
    from attnloom.trace.tracer import trace_mask, trace_score

    programs = (
        trace_mask(causal, torch.device("cpu")).program,
        trace_score(slope_bias(normal(4)), DType.F32, torch.device("cpu")).program,
    )
    for program in programs:
        assert structure.decode(structure.encode(program)) == program
        assert structure.decode(structure.encode(program)).digest == program.digest
    assert structure.decode(structure.encode(None)) is None


@pytest.mark.parametrize("text", ["{", '{"version":99}', '{"version":1,"nodes":[["?"]]}'])
def test_damaged_structure_text_is_named(text):
    with pytest.raises(OptionError, match="was given a mod it cannot read"):
        structure.decode(text)
