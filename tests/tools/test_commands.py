"""The commands explain, check and doctor: text, JSON, exit codes, progress."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from attnloom.cli import doctor as doctor_command
from attnloom.cli import output, progress
from attnloom.cli.main import main
from attnloom.tools.diagnosis import CacheFolder, Compiler, Diagnosis, Finding, Gpu

MODS = "tests.tools.mods"


def run(capsys, *argv):
    """Exit code, stdout, stderr."""
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_explain_text(capsys):
    code, out, err = run(
        capsys, "explain", f"{MODS}:learned", "--mask", f"{MODS}:documented", "--q-len", "512",
        "--heads", "4", "--kv-heads", "2", "--program",
    )  # fmt: skip
    assert (code, err) == (0, "")
    for line in (
        "query [1, 4, 512, 64], key and value [1, 2, 512, 64], float32 on cpu",
        "score_mod 'learned' (mods.py:9)",
        "  reads bias [4, 33] float32, gets a gradient",
        "  once a row     r0 = documents[q_idx]",
        "  d_bias[h, s0] += s2; summed over b",
        "    %0 = input i64 h                    # h",
        "  full     4 of 64 (6.2%)    the mask_mod is not asked",
        "  partial  28 of 64 (43.8%)  asked at every score",
        "  |██████  |",
        "  |    ████|",
    ):
        assert line in out.split("\n"), line
    assert "expected forward" in out
    assert "dense = all scores x cost of a plain tile" in out


def test_explain_json(capsys):
    code, out, _ = run(
        capsys, "explain", f"{MODS}:window(left=40)", "--q-len", "256", "--json", "--no-measure",
        "--block-size", "64,32",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert found["setting"]["dtype"] == "float32"
    assert found["setting"]["block_size"] == [64, 32]
    assert found["mods"][0]["statements"][-1]["name"] == "return"
    assert found["mask"]["num_tiles"] == 4 * 8
    assert found["speed"] is None


def test_check_text_and_codes(capsys):
    small = ("--q-len", "40", "--batch", "1", "--head-dim", "16")
    code, out, _ = run(capsys, "check", f"{MODS}:learned", *small)
    assert code == 0
    assert "d_bias" in out
    assert out.rstrip().endswith("as the error budget asks, at lengths 40 / 40")
    code, out, _ = run(capsys, "check", f"{MODS}:learned", "--heads", "6", *small)
    assert code == 1
    assert "indexes captured tensor 'bias'" in out
    assert out.rstrip().endswith("FAILED")
    code, out, _ = run(capsys, "check", f"{MODS}:learned", "--heads", "6", "--json", *small)
    assert (code, json.loads(out)["passed"]) == (1, False)


def test_sizes_that_were_told_are_noted(capsys):
    code, out, _ = run(capsys, "explain", f"{MODS}:learned", "--q-len", "64", "--no-measure")
    assert code == 0
    assert out.split("\n")[:2] == [
        "query [1, 4, 64, 64], key and value [1, 4, 64, 64], float32 on cpu",
        "  heads is 4, as bias[h, ...] has that length; --heads says otherwise",
    ]
    code, out, _ = run(capsys, "check", f"{MODS}:cancels", "--q-len", "64", "--head-dim", "16")
    assert code == 0
    assert "  heads is 3, as tilt[h] has that length; --heads says otherwise" in out
    (tilt,) = (line for line in out.split("\n") if line.startswith("  d_tilt"))
    assert tilt.split()[-3:] == ["-", "-", "ok"]


def test_doctor_json(capsys):
    code, out, _ = run(capsys, "doctor", "--no-run", "--json")
    found = json.loads(out)
    assert code == (0 if found["healthy"] else 1)
    assert found["self_test"] is None
    assert set(found["cache"]) == {"path", "exists", "num_kernels", "total_bytes", "problem"}


def test_doctor_text_of_a_sick_machine():
    gpu = Gpu("A GPU", "9.0", 80 << 30, 132, 227 << 10, 65536)
    finding = Finding(True, "no C++ compiler was found.", "Install g++.")
    folder = CacheFolder("/c", True, 3, 5 << 20, "")
    sick = Diagnosis(
        "3.12", "Linux", {"torch": "2.13", "triton": ""}, (), 2, 2, Compiler("", "", "none"),
        (gpu,), folder, None, (finding,),
    )  # fmt: skip
    assert "\n".join(doctor_command._text(sick)) == (
        "python     3.12 on Linux\n"
        "torch      2.13\n"
        "triton     not installed\n"
        "compiler   none\n"
        "processor  none that attnloom knows by name\n"
        "threads    2 of 2 cores\n"
        "gpu 0      A GPU, capability 9.0, 80.0 GiB, 132 multiprocessors, 227.0 KiB shared memory "
        "a block, 65536 registers each\n"
        "cache      /c: 3 kernels, 5.0 MiB\n"
        "\nPROBLEM: no C++ compiler was found.\n  Install g++.\n"
        "\nattention will fail or be slow"
    )


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("explain", "nowhere:mod"), 2, "attnloom explain: there is no module 'nowhere'"),
        (("check", f"{MODS}:three"), 2, "attnloom check: 'three(a, b, c)' takes 3 positional"),
        (("check", f"{MODS}:learned", "--q-len", "0"), 2, "attnloom check: q_len is 0; it must"),
        (("check", f"{MODS}:learned", "--backend", "cuda"), 2, "['backend'] is 'cuda', which is"),
        (("explain", f"{MODS}:learned", "--block-size", "5"), 2, "BLOCK_SIZE is 5, and 5 is not"),
        (
            ("explain", f"{MODS}:documented", "--mask", f"{MODS}:documented"),
            2,
            "are both mask_mods",
        ),
        (("explain", f"{MODS}:learned", "--mask", f"{MODS}:learned"), 2, "which is a score_mod;"),
        (("explain", f"{MODS}:sorts"), 1, "score_mod 'sorts' (mods.py:55) calls torch.sort"),
        (
            ("check", f"{MODS}:raises"),
            1,
            "the mod raised KeyError: 'slope' (mods.py:59)\n    return",
        ),
    ],
)
def test_errors(capsys, argv, code, said):
    got, out, err = run(capsys, *argv)
    assert got == code
    assert out == ""
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("explain",), "the following arguments are required: MODULE:FUNCTION"),
        (("check", "m:f", "--q-len", "many"), "argument --q-len: invalid int value: 'many'"),
        (("check", "m:f", "--dtype", "int8"), "argument --dtype: invalid choice: 'int8'"),
        (("explain", "m:f", "--block-size", "1,2,3"), "must be N or N,M, got 1,2,3"),
    ],
)
def test_wrong_options(capsys, argv, said):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal(monkeypatch):
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    screen = _Terminal()
    with progress.shown(screen) as line:
        line.begin("building the mask")
        deadline = time.monotonic() + 5
        while "building" not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "building the mask (0 s)" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_progress_is_silent_elsewhere_and_when_quick():
    plain, screen = io.StringIO(), _Terminal()
    for stream in (plain, screen):
        with progress.shown(stream) as line:
            line.begin("quick")
    assert plain.getvalue() == screen.getvalue() == ""


def test_units_and_tables():
    sizes = (0, 1023, 1024, 5 << 20, 3 << 40)
    shown = ["0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3072.0 GiB"]
    assert [output.size(n) for n in sizes] == shown
    assert output.table([]) == ""
    assert output.table([("a", 1, ""), ("bcd", 22, "x")]) == "  a    1\n  bcd  22  x"
    assert json.loads(output.to_json({"a": (float("inf"), SimpleNamespace(b=1).b)})) == {
        "a": [None, 1]
    }


def test_a_reader_that_stops_reading_is_no_traceback():
    """`attnloom explain ... | head -3` ended in a BrokenPipeError."""
    command = [sys.executable, "-m", "attnloom", "explain", f"{MODS}:learned", "--no-measure"]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
