"""An endpoint of a tiny model on a port of this machine, for tests."""

from __future__ import annotations

import dataclasses
import importlib
import time
from typing import Any

from attnloom.serving import ByteTokenizer, Engine, Limits, SamplingParams
from tests.serving.models import tiny

LIMITS = Limits(max_running=3, max_step_tokens=64, max_waiting=4, max_length=400)
MODEL = tiny()


@dataclasses.dataclass
class Running:
    """A server on a port of this machine."""

    engine: Engine
    url: str
    server: Any

    def client(self, **options: Any) -> Any:
        openai = importlib.import_module("openai")
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def metric(self, name: str) -> float:
        httpx = importlib.import_module("httpx")
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        (line,) = (text for text in lines if text.startswith(f"attnloom_{name} "))
        return float(line.split()[-1])

    def wait_until(self, name: str, value: float) -> None:
        end = time.monotonic() + 20
        while self.metric(name) != value:
            assert time.monotonic() < end, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.01)


def make_engine() -> Engine:
    return Engine(MODEL, ByteTokenizer(), LIMITS, num_pages=64, page_size=16)


def expected(prompt: str, max_tokens: int) -> str:
    """Greedy text of an engine of its own."""
    tokenizer = ByteTokenizer()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    (tokens,) = make_engine().generate([tokenizer.encode(prompt)], params)
    return tokenizer.decode(tokens)


GREEDY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
