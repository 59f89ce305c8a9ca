"""The reference of attnloom.serving names what there is, with the defaults that it has."""

from __future__ import annotations

import argparse
import dataclasses
import re

import pytest

from attnloom import serving
from attnloom.cli.serve import add_options
from tests.docs.blocks import ROOT

REFERENCE = (ROOT / "docs" / "api" / "serving.md").read_text()
GUIDE = (ROOT / "docs" / "serving.md").read_text()


@pytest.mark.parametrize("name", serving.__all__)
def test_every_name_is_in_the_reference(name: str) -> None:
    assert re.search(rf"`{name}\b", REFERENCE)


@pytest.mark.parametrize("kind", [serving.SamplingParams, serving.Limits])
def test_fields_have_the_defaults_that_the_reference_says(kind: type) -> None:
    for field in dataclasses.fields(kind):
        assert f"| `{field.name}` | `{field.default!r}` |" in REFERENCE


@pytest.mark.parametrize("kind", [serving.Output, serving.DraftTree, serving.Request])
def test_fields_are_in_the_reference(kind: type) -> None:
    for field in dataclasses.fields(kind):
        assert re.search(rf"`{field.name}`|\b{kind.__name__}\([^)]*\b{field.name}\b", REFERENCE)


def test_members_of_the_engine_are_in_the_reference() -> None:
    public = [name for name in vars(serving.Engine) if not name.startswith("_")]
    missing = [name for name in public if not re.search(rf"`{name}\b", REFERENCE)]
    assert len(public) > 5 and not missing


def test_every_option_of_the_command_is_in_the_guide() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    rows = [line for line in GUIDE.splitlines() if line.startswith("| `")]
    for action in parser._actions:
        option = next((text for text in action.option_strings if text.startswith("--")), None)
        if option in (None, "--help"):
            continue
        (row,) = (line for line in rows if f"`{option}`" in line.split("|")[1])
        if action.default not in (None, False):
            assert f"`{action.default}`" in row, option


def test_every_metric_is_in_the_guide() -> None:
    pytest.importorskip("fastapi", reason="needs the extra 'serve'")
    from attnloom.serving.metrics import render
    from attnloom.serving.server import _gauges
    from attnloom.serving.service import Service
    from tests.serving.endpoint import make_engine

    service = Service(make_engine())
    try:
        text = render(service.engine.metrics, _gauges(service))
    finally:
        service.close()
    names = re.findall(r"^# TYPE attnloom_(\S+)", text, re.MULTILINE)
    section = GUIDE.split("### Metrics")[1].split("###")[0]
    missing = [name for name in names if not re.search(rf"`{name}[`{{]", section)]
    assert len(names) > 15 and not missing
    told = re.findall(r"`(\w+)(?:{\w+})?`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.M)))
    assert set(told) == set(names)
