"""The demo's corpus, variant, model and sampling, piece by piece."""

import itertools

import pytest
import torch

from attnloom.demo.corpus import pack_batches, read_documents
from attnloom.demo.generate import generate
from attnloom.demo.model import Decoder, ModelConfig
from attnloom.demo.train import TrainConfig, fused_attend, train
from attnloom.demo.variant import Variant

DOCUMENTS = [bytes([65 + i]) * size for i, size in enumerate((3, 50, 7, 1, 300, 20))]
SMALL = ModelConfig(num_layers=2, width=64, num_heads=2, variant=Variant(window_left=16))


def test_the_standard_library_is_there_and_bounded():
    documents = read_documents(limit_bytes=100_000)
    assert 100_000 <= sum(map(len, documents)) < 100_000 + 60_000
    assert any(b"def " in document for document in documents)


def test_packed_rows_have_no_padding_and_never_mix_documents():
    seen = 0
    for batch in itertools.islice(pack_batches(DOCUMENTS, rows=3, length=40, seed=1), 20):
        assert batch.tokens.shape == batch.documents.shape == (3, 40)
        for row in range(3):
            for owner in batch.documents[row].unique():
                inside = batch.documents[row] == owner
                assert batch.tokens[row][inside].unique().numel() == 1
            inner = batch.counted[row]
            assert torch.equal(batch.targets[row][inner], batch.tokens[row][inner])
            starts = (batch.documents[row].diff() != 0).sum()
            assert starts == batch.documents[row].max()
        seen += int(batch.counted.sum())
    assert seen > 0


def test_batches_repeat_by_seed():
    first, second = (next(pack_batches(DOCUMENTS, 3, 400, seed=5)) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    other = next(pack_batches(DOCUMENTS, 3, 400, seed=6))
    assert not torch.equal(first.tokens, other.tokens)


def test_a_document_never_sees_another():
    """Changing the tokens of one document leaves the logits of the others as they were."""
    torch.manual_seed(0)
    decoder = Decoder(SMALL)
    for parameter in decoder.parameters():  # the output projections start at zero
        torch.nn.init.normal_(parameter, std=0.1)
    documents = torch.tensor([[0] * 30 + [1] * 34])
    tokens = torch.randint(256, (1, 64))
    changed = torch.where(documents == 0, (tokens + 1) % 256, tokens)
    attends = [fused_attend(SMALL.variant, SMALL.variant.block_mask(documents))] * 2
    with torch.no_grad():
        before, after = decoder(tokens, attends), decoder(changed, attends)
    torch.testing.assert_close(before[:, 30:], after[:, 30:])
    assert (before[:, :30] - after[:, :30]).abs().max() > 0.01


def test_sampling_with_a_cache_matches_the_whole_sequence():
    """Greedy sampling, one byte at a time, against logits of the finished text in one pass."""
    torch.manual_seed(1)
    decoder = Decoder(SMALL)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    prompt = b"def f(x):"
    text = generate(decoder, prompt, 40, seed=0, temperature=1e-6)
    assert len(text) == 40
    whole = torch.tensor([list(prompt + text)])
    block_mask = SMALL.variant.block_mask(torch.zeros_like(whole))
    with torch.no_grad():
        logits = decoder(whole, [fused_attend(SMALL.variant, block_mask)] * 2)
    assert bytes(logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()) == text


def test_training_lowers_the_loss_and_moves_the_bias():
    torch.manual_seed(2)
    decoder = Decoder(SMALL)
    bias = decoder.layers[0].bias.detach().clone()
    config = TrainConfig(model=SMALL, rows=2, length=128, seconds=600, steps=12, seed=3)
    steps = list(train(decoder, read_documents(limit_bytes=50_000), config))
    assert [step.index for step in steps] == list(range(1, 13))
    assert steps[0].loss == pytest.approx(5.545, abs=0.01)  # ln 256: it starts knowing nothing
    assert steps[-1].loss < steps[0].loss - 1
    assert (decoder.layers[0].bias - bias).abs().max() > 1e-3
