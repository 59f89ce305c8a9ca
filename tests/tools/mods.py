"""Mods that the tools are pointed at by name."""

import torch

bias = torch.linspace(-1, 1, 4 * 33).view(4, 33).requires_grad_()
documents = torch.arange(4096) // 300


def learned(score, b, h, q_idx, kv_idx):
    score = score + bias[h, (q_idx - kv_idx).clamp(0, 32)]
    return 20 * torch.tanh(score / 20)


def window(left=16):
    def mask_mod(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance <= left)

    return mask_mod


def documented(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (documents[q_idx] == documents[kv_idx])


def alibi(num_heads):
    slope = torch.exp2(-8.0 * torch.arange(1, num_heads + 1) / num_heads)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slope[h] * (kv_idx - q_idx)

    return score_mod


class Table(torch.nn.Module):
    """A mod in a module: its parameter is what is learned."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, 4 * 8).view(4, 8))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.table[h, (q_idx - kv_idx).abs().clamp(max=7)]


layer = Table()


def three(a, b, c):
    return a


def sorts(score, b, h, q_idx, kv_idx):
    return torch.sort(score)[0]


def raises(score, b, h, q_idx, kv_idx):
    return score * {}["slope"]


tilt = torch.zeros(3, requires_grad=True)


def cancels(score, b, h, q_idx, kv_idx):
    """Adds to even rows what it takes from odd ones: over all rows the gradient is 0."""
    return score + tilt[h] * (1 - 2 * (q_idx % 2))


def pair():
    """A factory of several mods."""
    return window(), window(4)
