"""A silent engine with live requests makes the instance degraded, and not ready; its next record heals it."""

import asyncio
import socket
import time
from pathlib import Path

from engine.config import EngineConfig
from service.engine_client import EngineClient
from service.instance import Instance, State
from service.options import ServeOptions
from service.registry import Registry
from service.runtime import STALL_SECONDS, Runtime
from service.tokenizer import Tokenizer


def test_a_stalled_engine_is_noticed(tiny_dir: Path) -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        options = ServeOptions(model="m", served_model_name="m", engine=EngineConfig(model=str(tiny_dir)))
        engine, instance = EngineClient(ours), Instance()
        runtime = Runtime(options, Tokenizer.load(tiny_dir), engine, instance, Registry(10, 10))
        instance.move(State.SERVING)

        def state() -> State:
            assert instance.ready == (instance.state is State.SERVING)
            return instance.state

        engine.last_seen = time.monotonic() - STALL_SECONDS - 1
        runtime.check_progress()
        assert state() is State.SERVING, "an idle engine may be silent"
        engine._receivers[1] = runtime.new_request("x", time.monotonic())
        runtime.check_progress()
        assert state() is State.DEGRADED
        assert "no engine step" in instance.reason
        instance.refuse_unless_accepting()
        engine.last_seen = time.monotonic()
        runtime.check_progress()
        assert state() is State.SERVING
        ours.close()
        theirs.close()

    asyncio.run(scenario())
