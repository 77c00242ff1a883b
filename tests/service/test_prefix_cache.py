"""The prefix cache as clients and operators see it: what is reused, who shares it, what is told of it, and its end."""

import itertools
import re
from typing import Any

import pytest

from protos.picovllm.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.picovllm.inference.v1 import inference_pb2 as pb
from tests.service.conftest import StartServer
from tests.service.many_fronts import stub_per_front
from tests.service.results import assemble
from tests.service.rpc import failure_of, generate, spec, stream
from tests.service.server_process import ServerProcess

BLOCK = 16
COUNTERS = ("lookups", "hits", "looked_up_tokens", "hit_tokens", "copies", "evicted_blocks")
_numbers = itertools.count(1000)


@pytest.fixture(params=["tiny", "fake"])
def server(request: pytest.FixtureRequest) -> ServerProcess:
    """Both engines: the fake one must not be kinder than the real one."""
    found: ServerProcess = request.getfixturevalue(f"{request.param}_server")
    return found


@pytest.fixture
def prompt() -> list[int]:
    """A prompt of 80 tokens that nobody had before and that the fake engine writes again."""
    number = next(_numbers)
    return [number, *range(2000 + number, 2079 + number)]


def ask(prompt: list[int], salt: str = "", *, bypass: bool = False, max_tokens: int = 24, **more: Any) -> Any:
    cache = pb.CacheOptions(cache_salt=salt, bypass_prefix_cache=bypass)
    stopping = pb.Stopping(max_tokens=max_tokens, ignore_eos=True)
    return spec(token_ids=pb.TokenIds(ids=prompt), stopping=stopping, cache=cache, **more)


def cached(stub: Any, request: pb.GenerationSpec) -> int:
    """Cached prompt tokens of a request that is run to its end, streamed: told at the start and at the end."""
    events = list(stream(stub, request))
    assert events[0].started.cached_prompt_tokens == events[-1].completed.usage.cached_prompt_tokens
    assert events[-1].completed.usage.prompt_tokens == len(request.token_ids.ids)
    return int(events[0].started.cached_prompt_tokens)


def flush(server: ServerProcess) -> tuple[int, int]:
    """Blocks freed and blocks held."""
    response = server.admin.FlushCache(admin_pb2.FlushCacheRequest(), timeout=10)
    return response.kv_blocks_freed, response.kv_blocks_held


def values(server: ServerProcess) -> dict[str, int]:
    """The cache's metrics, by their names without the common beginning."""
    text = server.admin.GetMetrics(admin_pb2.GetMetricsRequest()).text
    found = re.findall(r"^picovllm_(?:prefix_cache_(\w+)_total|(kv_blocks_\w+)) (\d+)$", text, re.MULTILINE)
    return {counter or gauge: int(value) for counter, gauge, value in found}


def test_the_same_prompt_again_is_reused_and_gives_the_same(server: ServerProcess, prompt: list[int]) -> None:
    stub, request = server.stub(), ask(prompt, output=pb.OutputOptions(token_ids=True))
    first = generate(stub, request)
    again = generate(stub, request)
    streamed = assemble(list(stream(stub, request)))
    longer = generate(stub, ask([*prompt, *first.outputs[0].token_ids, 5]))
    assert first.usage.cached_prompt_tokens == 0
    whole = (len(prompt) - 1) // BLOCK * BLOCK
    for result in (again, streamed):
        assert whole <= result.usage.cached_prompt_tokens < len(prompt), "the last token is computed"
        assert result.usage.prompt_tokens == len(prompt)
        assert result.usage.total_tokens == len(prompt) + 24
    assert first.outputs == again.outputs == streamed.outputs
    assert longer.usage.cached_prompt_tokens >= len(prompt)


def test_salts_share_nothing(server: ServerProcess, prompt: list[int]) -> None:
    stub = server.stub()
    salts = ["", "a", "b", "a\0", "ä", "a" * 128]
    assert [cached(stub, ask(prompt, salt)) for salt in salts] == [0] * len(salts)
    assert all(cached(stub, ask(prompt, salt)) for salt in salts)
    texts = {generate(stub, ask(prompt, salt)).outputs[0].text for salt in salts}
    assert len(texts) == 1, "a salt is no part of the prompt"


def test_a_bypass_neither_reads_nor_leaves_anything(server: ServerProcess, prompt: list[int]) -> None:
    stub = server.stub()
    before = values(server)
    assert cached(stub, ask(prompt, bypass=True)) == 0
    assert cached(stub, ask(prompt, bypass=True)) == 0
    assert values(server) == before
    assert cached(stub, ask(prompt)) == 0, "nothing was left"
    assert cached(stub, ask(prompt)) > 0
    assert cached(stub, ask(prompt, bypass=True)) == 0, "nothing is read"


@pytest.mark.parametrize("fields", [{"output": pb.OutputOptions(prompt_logprobs=1)}, {"max_tokens": 0}], ids=str)
def test_where_the_prompt_is_scored_all_of_it_is_computed(
    server: ServerProcess, prompt: list[int], fields: dict[str, Any]
) -> None:
    stub = server.stub()
    generate(stub, ask(prompt))
    assert cached(stub, ask(prompt, **fields)) == 0


def test_a_flush_forgets_everything_of_every_salt(server: ServerProcess, prompt: list[int]) -> None:
    stub = server.stub()
    for salt in ("", "a"):
        generate(stub, ask(prompt, salt))
    load = server.wait_idle()
    assert load.kv_blocks_used == 0, "what is only cached is not in use"
    assert load.kv_blocks_reusable >= 2 * (len(prompt) // BLOCK)
    assert flush(server) == (load.kv_blocks_reusable, 0)
    assert flush(server) == (0, 0)
    assert server.load().kv_blocks_reusable == 0
    assert [cached(stub, ask(prompt, salt)) for salt in ("", "a")] == [0, 0]
    assert cached(stub, ask(prompt)) > 0, "and goes on"


def test_metrics_tell_what_happened(server: ServerProcess, prompt: list[int]) -> None:
    stub = server.stub()
    flush(server)
    before = values(server)
    assert before.keys() >= {*COUNTERS, "kv_blocks_cached", "kv_blocks_used"}
    assert (before["kv_blocks_cached"], before["kv_blocks_used"]) == (0, 0)
    hit = [cached(stub, ask(prompt)) for _ in range(3)]
    freed = server.wait_idle().kv_blocks_reusable
    after = values(server)
    assert (after["kv_blocks_cached"], after["kv_blocks_used"]) == (freed, 0)
    assert flush(server) == (freed, 0)
    after = values(server)
    assert after["kv_blocks_cached"] == 0
    moved = {name: after[name] - before[name] for name in COUNTERS}
    copies = moved.pop("copies")
    assert moved == {
        "lookups": 3, "hits": 2, "looked_up_tokens": 3 * len(prompt), "hit_tokens": sum(hit), "evicted_blocks": 0,
    }
    assert copies == sum(tokens % BLOCK > 0 for tokens in hit)


def test_the_fronts_share_one_cache_and_one_flush(start_tiny: StartServer, prompt: list[int]) -> None:
    server = start_tiny("--front-processes", "2", "--num-gpu-blocks", "256")
    first, second = stub_per_front(server, 2)
    assert cached(first, ask(prompt)) == 0
    assert cached(second, ask(prompt)) > 0
    assert cached(second, ask(prompt, "mine")) == 0
    assert cached(first, ask(prompt, "mine")) > 0
    assert flush(server)[0] > 0
    assert [cached(stub, ask(prompt)) > 0 for stub in (second, first)] == [False, True]


def test_cached_blocks_make_room_for_requests(start_tiny: StartServer) -> None:
    """A pool that is full of what is cached is as good as an empty one."""
    server = start_tiny("--num-gpu-blocks", "32")
    stub = server.stub()
    for number in range(12):
        generate(stub, ask([number] * (5 * BLOCK)))
        load = server.wait_idle()
        assert (load.kv_blocks_used, load.kv_blocks_total) == (0, 32)
        assert load.kv_blocks_reusable <= 32
    assert load.kv_blocks_reusable > 16
    assert values(server)["evicted_blocks"] > 0
    whole = generate(stub, ask([777] * (31 * BLOCK), max_tokens=BLOCK))
    assert (whole.usage.completion_tokens, whole.usage.preemptions) == (BLOCK, 0)


def test_a_server_without_the_cache_honours_salts_and_bypasses_by_themselves(
    start_tiny: StartServer, prompt: list[int]
) -> None:
    server = start_tiny("--no-prefix-cache", "--num-gpu-blocks", "256")
    stub = server.stub()
    assert server.status().effective_config["prefix_cache"] is False
    assert not stub.GetModelInfo(pb.GetModelInfoRequest()).features.prefix_cache
    requests = [ask(prompt), ask(prompt), ask(prompt, "a"), ask(prompt, bypass=True), ask(prompt, "a", bypass=True)]
    assert [cached(stub, request) for request in requests] == [0] * 5
    assert server.wait_idle().kv_blocks_reusable == 0
    assert flush(server) == (0, 0)
    assert {values(server)[name] for name in (*COUNTERS, "kv_blocks_cached")} == {0}


def test_a_server_with_the_cache_says_so(server: ServerProcess) -> None:
    assert server.stub().GetModelInfo(pb.GetModelInfoRequest()).features.prefix_cache
    assert server.status().effective_config["prefix_cache"] is True


def test_the_warm_up_is_not_counted(start_tiny: StartServer) -> None:
    server = start_tiny("--num-gpu-blocks", "64")
    assert {values(server)[name] for name in (*COUNTERS, "kv_blocks_cached")} == {0}


def test_flushes_beside_a_running_request_leave_it_alone(tiny_server: ServerProcess, prompt: list[int]) -> None:
    stub, request = tiny_server.stub(), ask(prompt, max_tokens=400, output=pb.OutputOptions(token_ids=True))
    expected = generate(stub, request).outputs
    flush(tiny_server)
    events = stream(stub, request)
    received = [next(events) for _ in range(5)]
    freed, held = flush(tiny_server)
    assert freed == 0
    assert held >= len(prompt) // BLOCK, "all are held by the request"
    for event in events:
        received.append(event)
        if len(received) % 20 == 0:
            flush(tiny_server)
    assert assemble(received).outputs == expected
    load = tiny_server.wait_idle()
    assert load.kv_blocks_used == 0
    assert flush(tiny_server) == (load.kv_blocks_reusable, 0)


def test_a_flush_needs_an_engine(start_fake: StartServer) -> None:
    server = start_fake("--fake-load-time", "20", wait=False)
    address = server.wait_log(r"and (\S+) for administration")
    admin = admin_pb2_grpc.AdminServiceStub(server.channel(address))
    assert failure_of(lambda: admin.FlushCache(admin_pb2.FlushCacheRequest(), timeout=10)).reason == "STARTING"
    server.terminate()
