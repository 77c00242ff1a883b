"""A silent engine with live requests makes the instance degraded, and not ready; its next record heals it."""

import asyncio
import socket
import time
from pathlib import Path

from engine.config import EngineConfig
from service.board import Board
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
        board = Board(1)
        engine, instance = EngineClient(ours), Instance(board)
        runtime = Runtime(options, Tokenizer.load(tiny_dir), engine, instance, Registry(instance, board, 0, 10, 10))
        instance.serve()

        def state() -> State:
            assert instance.ready == (instance.state is State.SERVING)
            return instance.state

        engine.last_seen = time.monotonic() - STALL_SECONDS - 1
        runtime.check_progress(busy=False)
        assert state() is State.SERVING, "an idle engine may be silent"
        runtime.check_progress(busy=True)
        assert state() is State.SERVING, "it has been busy for a moment only"
        runtime.idle_time = engine.last_seen
        runtime.check_progress(busy=True)
        assert state() is State.DEGRADED
        assert "no engine step for 31 s" in instance.reason
        engine.last_seen = runtime.idle_time = engine.last_seen - 9
        runtime.check_progress(busy=True)
        assert "no engine step for 31 s" in instance.reason, "told once"
        instance.refuse_unless_accepting()
        engine.last_seen = time.monotonic()
        runtime.check_progress(busy=True)
        assert state() is State.SERVING
        board.close()
        ours.close()
        theirs.close()

    asyncio.run(scenario())
