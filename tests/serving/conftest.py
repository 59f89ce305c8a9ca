"""The endpoint that tests of the server share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.serving.endpoint import Running, make_engine


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
    pytest.importorskip("fastapi", reason="needs the extra 'serve'")
    from attnloom.serving.server import create_app

    engine = make_engine()
    config = uvicorn.Config(create_app(engine, "tiny"), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Running(engine, f"http://127.0.0.1:{port}", server)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
