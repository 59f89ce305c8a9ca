"""The demo as a person starts it, cut short."""

import functools

import pytest

from attnloom.cli.main import main
from attnloom.demo import compare, memory, run, train
from attnloom.demo.oracle import check_against_oracle
from attnloom.demo.variant import Variant


def test_the_variant_agrees_with_the_oracle():
    results = check_against_oracle(Variant(), seed=4)
    assert [result.name for result in results] == ["out", "dq", "dk", "dv", "dbias"]
    assert all(result.agrees for result in results), results


def test_a_wrong_variant_is_seen(monkeypatch):
    """An off-by-one window, planted on our side only, must not pass the demo's own check."""
    from attnloom.demo import variant as module

    honest = module.Variant.block_mask

    def off_by_one(self, documents):
        return honest(module.Variant(self.window_left + 1, self.soft_cap), documents)

    monkeypatch.setattr(module.Variant, "block_mask", off_by_one)
    assert not all(result.agrees for result in check_against_oracle(Variant(), seed=4))


@pytest.mark.slow
def test_a_short_run_ends_well_and_leaves_its_pictures(tmp_path, monkeypatch, capsys):
    """On a quarter of a row: the 16 steps of the real size take most of a minute."""
    small = functools.partial(train.TrainConfig, length=512)
    monkeypatch.setattr(train, "TrainConfig", small)
    ours = compare.measure_step  # in a process of its own, as all of them are in the demo
    monkeypatch.setattr(
        run,
        "measure_step",
        lambda name, *shape: (
            ours(name, *shape) if name == "attnloom" else compare._measure_here(name, *shape)
        ),
    )
    monkeypatch.setattr(run, "DemoConfig", functools.partial(run.DemoConfig, generated_bytes=50))
    assert main(["demo", "--steps", "4", "--seed", "1", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for text in ("agrees", "tokens/s", "tiles skipped", "Summary", "dense SDPA: mask only"):
        assert text in said
    pictures = sorted(path.name for path in tmp_path.iterdir())
    assert pictures == ["blocks.png", "loss.png", "scores.png"]
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in pictures)


def test_peak_memory_counts_what_was_freed_again():
    before = memory.resident_bytes()
    if before is None:
        pytest.skip("this system does not tell how much memory is resident")
    memory.reset_peak()
    bytearray(b"x" * (64 << 20))
    assert memory.peak_bytes() - before >= 60 << 20
