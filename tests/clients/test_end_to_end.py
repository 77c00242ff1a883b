"""The client against the real server, with the tiny model."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients import cli
from clients.client import AdminClient, PicoClient
from clients.errors import PicoError
from protos.picovllm.admin.v1 import admin_pb2 as admin
from protos.picovllm.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True)
class Served:
    inference: str
    admin: str
    process: subprocess.Popen[bytes]


def start(model: Path, folder: Path) -> Served:
    ready = folder / "ready.json"
    options = {"model": model, "listen": "127.0.0.1:0", "admin-listen": "127.0.0.1:0", "lame-duck": 0}
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "service", *arguments, "--ready-file", str(ready)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 120
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the server did not start:\n{(folder / 'server.log').read_text()}")
        time.sleep(0.05)
    addresses = json.loads(ready.read_text())
    return Served(addresses["inference"], addresses["admin"], process)


@pytest.fixture(scope="module")
def served(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the module; its shutdown through the client is the last thing tested."""
    running = start(tiny_dir, tmp_path_factory.mktemp("served"))
    yield running
    with AdminClient(running.admin) as operator:
        operator.shutdown(drain_timeout=5)
    assert running.process.wait(30) == 0


@pytest.fixture
def client(served: Served) -> Iterator[PicoClient]:
    with PicoClient(served.inference) as opened:
        yield opened


@pytest.fixture
def operator(served: Served) -> Iterator[AdminClient]:
    with AdminClient(served.admin) as opened:
        yield opened


def wait_until_idle(operator: AdminClient) -> None:
    deadline = time.monotonic() + 10
    while operator.list_requests():
        assert time.monotonic() < deadline, "a request is still alive"
        time.sleep(0.02)
    assert operator.load().kv_blocks_used == 0


def test_what_was_computed_is_reused_until_the_cache_is_flushed(client: PicoClient, operator: AdminClient) -> None:
    prompt, alone = "It was the best of times, it was the worst of times. " * 4, {"cache_salt": "times"}

    def ask(**options: Any) -> pb.GenerateResponse:
        return client.generate(prompt, temperature=0, max_tokens=8, **(alone | options))

    first, again, bypassed = ask(), ask(), ask(bypass_prefix_cache=True)
    assert [reply.usage.cached_prompt_tokens > 0 for reply in (first, again, bypassed)] == [False, True, False]
    assert {reply.outputs[0].text for reply in (first, again, bypassed)} == {first.outputs[0].text}
    wait_until_idle(operator)
    reusable = operator.load().kv_blocks_reusable
    assert reusable > 0
    flushed = operator.flush_cache()
    assert (flushed.kv_blocks_freed, flushed.kv_blocks_held) == (reusable, 0)
    assert operator.load().kv_blocks_reusable == 0
    assert ask().usage.cached_prompt_tokens == 0


def test_stream_and_generate_say_the_same(client: PicoClient) -> None:
    reply = client.generate("Once upon a time", temperature=1.0, seed=3, max_tokens=20, token_ids=True, ignore_eos=True)
    with client.stream("Once upon a time", temperature=1.0, seed=3, max_tokens=20, ignore_eos=True) as stream:
        text = "".join(stream.texts())
    assert text == reply.outputs[0].text
    assert len(reply.outputs[0].token_ids) == 20
    assert stream.progress.completed is not None
    assert stream.progress.completed.usage == reply.usage
    assert stream.progress.finished[0].finish_reason == pb.FINISH_REASON_LENGTH


def test_every_option_arrives(client: PicoClient) -> None:
    reply = client.generate(
        [1, 2, 3, 4],
        request_id="all-options",
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        repetition_penalty=1.1,
        seed=2**63 + 1,
        n=2,
        logit_bias={7: 1.0},
        max_tokens=5,
        min_tokens=2,
        stop=["never to be seen"],
        stop_token_ids=[9],
        ignore_eos=True,
        token_ids=True,
        top_logprobs=2,
        prompt_logprobs=1,
        logprobs_mode=pb.LOGPROBS_MODE_RAW,
        skip_special_tokens=False,
        echo=True,
        bypass_prefix_cache=True,
        cache_salt="salt",
        priority=-3,
        queue_timeout=30,
        max_duration=30,
        timeout=60,
    )
    assert reply.request_id == "all-options"
    assert reply.seed == 2**63 + 1
    assert list(reply.prompt_token_ids) == [1, 2, 3, 4]
    assert len(reply.prompt_logprobs) == 4
    assert len(reply.outputs) == 2
    assert all(len(token.top) == 2 for output in reply.outputs for token in output.logprobs)


def test_the_tokenizer_round_trips(client: PicoClient) -> None:
    text = "Grüße, 世界! 12345"
    assert client.detokenize(client.tokenize(text)) == text
    chat = client.tokenize([{"role": "user", "content": text}])
    assert "<|im_start|>user" in client.detokenize(chat, skip_special_tokens=False)


def test_leaving_a_stream_frees_its_memory(client: PicoClient, operator: AdminClient) -> None:
    with client.stream("Once", max_tokens=10_000, ignore_eos=True, request_id="left-early") as stream:
        next(stream.texts())
        assert [request.request_id for request in operator.list_requests()] == ["left-early"]
    wait_until_idle(operator)


def test_the_operator_cancels_a_request(client: PicoClient, operator: AdminClient) -> None:
    with pytest.raises(PicoError) as failure, client.stream("Once", max_tokens=10_000, ignore_eos=True) as stream:
        for event in stream:
            if event.HasField("started"):
                operator.cancel_requests([event.started.request_id])
    assert (failure.value.code, failure.value.reason) == (grpc.StatusCode.ABORTED, "ADMIN_CANCELLED")
    wait_until_idle(operator)


def test_bad_fields_come_with_their_paths(client: PicoClient) -> None:
    with pytest.raises(PicoError) as failure:
        client.generate("hi", temperature=3, top_p=0, request_id="bad id!")
    assert {violation.field for violation in failure.value.violations} == {
        "spec.sampling.temperature",
        "spec.sampling.top_p",
        "spec.request_id",
    }


def test_a_deadline_is_the_servers_word(client: PicoClient) -> None:
    with pytest.raises(PicoError) as failure:
        client.generate("Once", max_tokens=10_000, ignore_eos=True, timeout=1.0)
    assert (failure.value.code, failure.value.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_DECODE")


def test_drain_refuses_and_undrain_serves_again(served: Served, client: PicoClient, operator: AdminClient) -> None:
    assert operator.status().state == admin.INSTANCE_STATE_SERVING
    with operator.watch() as events:
        watching = iter(events)
        next(watching)
        operator.drain(lame_duck=0, drain_timeout=5, reason="test")
        assert next(e for e in watching if e.status.state == admin.INSTANCE_STATE_DRAINING).status.reason == "test"
    with pytest.raises(PicoError) as failure:
        client.generate("hi", max_tokens=1, timeout=10)
    assert failure.value.code == grpc.StatusCode.UNAVAILABLE
    operator.undrain()
    assert operator.status().state == admin.INSTANCE_STATE_SERVING
    with PicoClient(served.inference) as again:
        assert len(again.generate("hi", max_tokens=1, ignore_eos=True).outputs) == 1


def test_the_command_against_the_server(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    address, operators = ["--address", served.inference], ["--admin-address", served.admin]
    assert cli.main(["generate", "Once", "--max-tokens", "3", "--seed", "1", "--stats", *address]) == 0
    assert "3 generated" in capsys.readouterr().err
    for command in (["info", *address], *([name, *operators] for name in ("status", "load", "requests", "flush"))):
        assert cli.main(command) == 0
        assert cli.main([*command, "--json"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert "features       chat, prefix_cache" in out
    assert "KV blocks freed, 0 held by live requests" in out
