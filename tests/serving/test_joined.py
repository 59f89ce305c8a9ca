"""Weights of layers with one input lie side by side, whatever is done to a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from attnloom.serving.decoder import SelfAttention
from attnloom.serving.joined import Joined, join_weights
from tests.serving.models import LLAMA, tiny

BIASED = {**LLAMA, "attention_bias": True, "mlp_bias": True}


def parts(model: nn.Module) -> list[Joined]:
    return [module for module in model.modules() if isinstance(module, Joined)]


def check(module: Joined, joined: bool) -> None:
    """One product where the weights are joined, and the same numbers in any case."""
    layers = [module.get_submodule(name) for name in module.joins]
    x = torch.randn(3, layers[0].in_features, dtype=layers[0].weight.dtype)
    want = torch.cat([layer(x) for layer in layers], -1)
    torch.testing.assert_close(module.product(x), want)
    assert module._are_joined() == joined


@pytest.mark.parametrize("given", [LLAMA, BIASED], ids=["plain", "biased"])
def test_names_and_values_stay(given: dict) -> None:
    model = tiny(given)
    names = [name for name, _ in model.named_parameters()]
    assert "layers.0.self_attn.q_proj.weight" in names and "layers.1.mlp.up_proj.weight" in names
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    join_weights(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert len(parts(model)) == 4
    for module in parts(model):
        check(module, joined=True)


def test_weights_that_move_are_joined_again() -> None:
    model = tiny(BIASED).to(torch.bfloat16).to(torch.float32)
    for module in parts(model):
        check(module, joined=True)
        layers = [module.get_submodule(name) for name in module.joins]
        assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1


def test_weights_that_are_given_or_changed_count() -> None:
    module = tiny().layers[0].self_attn
    assert isinstance(module, SelfAttention)
    with torch.no_grad():
        module.k_proj.weight.mul_(2)  # in place: still a part of the whole
    check(module, joined=True)
    module.v_proj.weight = nn.Parameter(torch.randn(32, 32))
    check(module, joined=False)
    module.join()
    check(module, joined=True)
    module.q_proj.weight.data = torch.randn(64, 32)
    check(module, joined=False)


def test_a_copy_of_a_model_has_its_own_weights() -> None:
    model = tiny()
    module = parts(copy.deepcopy(model))[0]
    with torch.no_grad():
        module.get_submodule("q_proj").weight.zero_()
    x = torch.randn(2, 32)
    assert module.product(x)[:, :64].abs().max() == 0
    assert parts(model)[0].product(x)[:, :64].abs().max() > 0
