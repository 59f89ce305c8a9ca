"""Linear layers of one input whose weights lie side by side, so that one product gives all of them.

Each keeps its parameter under its own name, as a view: weights are read, saved, loaded and changed
in place as if they lay apart. At a few rows a product takes as long as its weights are read, and a
device is not filled by a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Joined(nn.Module):
    """A module some of whose layers take the same input. joins: their names."""

    joins: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self._joined: tuple[Tensor, Tensor | None] | None = None
        self._places: list[tuple[str, str, int]] = []

    def join(self) -> None:
        """Move the weights of the layers, and their biases, into one piece of memory."""
        layers = self._layers()
        weight = _side_by_side([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = _side_by_side(biases) if biases else None
        first = 0
        for layer in layers:
            last = first + layer.out_features
            layer.weight = nn.Parameter(weight[first:last], layer.weight.requires_grad)
            if bias is not None:
                layer.bias = nn.Parameter(bias[first:last], layer.bias.requires_grad)
            first = last
        self._joined = weight, bias
        self._places = [
            (name, kind, parameter.data_ptr())
            for name, layer in zip(self.joins, layers, strict=True)
            for kind, parameter in layer.named_parameters()
        ]

    def product(self, x: Tensor) -> Tensor:
        """Outputs of all layers, [..., the sum of their widths]."""
        joined = self._joined
        if joined is not None and self._are_joined():
            return F.linear(x, *joined)
        return torch.cat([layer(x) for layer in self._layers()], dim=-1)

    def _layers(self) -> list[nn.Linear]:
        found = [getattr(self, name) for name in self.joins]
        assert all(isinstance(layer, nn.Linear) for layer in found)
        return found

    def _are_joined(self) -> bool:
        """Whether parameters lie where they were put, and nobody gave a layer others. Asked at each
        product, so that modules' own lookups are gone around."""
        modules = self._modules
        for layer, name, place in self._places:
            parameter = modules[layer]._parameters.get(name)  # pyright: ignore
            if parameter is None or parameter.data_ptr() != place:
                return False
        return bool(self._places)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Joined:
        """Parameters that move to another device or dtype are joined there anew."""
        was_joined, self._joined = self._joined is not None, None
        super()._apply(fn, recurse)
        if was_joined:
            self.join()
        return self


def join_weights(model: nn.Module) -> None:
    """Join what can be joined in a model; takes room for one module's weights meanwhile."""
    for module in model.modules():
        if isinstance(module, Joined):
            module.join()


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.detach() for part in parts])
