import json
import subprocess
import sys

import grpc
import pytest

from clients import cli
from clients.display import error_lines
from clients.errors import PicoError
from tests.clients.fake_server import WORDS, FakeServer

ANSWER = "".join(WORDS)


@pytest.fixture(autouse=True)
def addresses(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PICOVLLM_ADDRESS", server.address)
    monkeypatch.setenv("PICOVLLM_ADMIN_ADDRESS", server.address)


def test_generate_streams_the_text(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hi", "--temperature", "0", "--stop", "a", "--stop", "b", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n"
    assert err.startswith("5 prompt tokens, 6 generated\n")
    (request,) = server.inference.requests
    assert request.spec.sampling.HasField("temperature")
    assert list(request.spec.stopping.stop_strings) == ["a", "b"]
    assert not request.spec.HasField("output")


def test_generate_json_is_the_whole_reply(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hi", "--chat", "--json"]) == 0
    reply = json.loads(capsys.readouterr().out)
    assert reply["outputs"][0]["text"] == ANSWER
    assert reply["outputs"][0]["finish_reason"] == "FINISH_REASON_STOP"


def test_generate_with_several_outputs(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hi", "--n", "2"]) == 0
    assert capsys.readouterr().out == f"--- 0\n{ANSWER}\n"
    assert server.inference.requests[0].spec.sampling.n == 2


def test_bad_fields_are_printed_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "bad fields"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: INVALID_ARGUMENT/FIELD_INVALID",
        "  spec.sampling.top_p: is wrong",
        "  spec.stopping.max_tokens: is wrong",
        "  request r-7",
    ]


def test_a_failure_without_a_reason_of_the_server_comes_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--address", "127.0.0.1:1"]) == 1
    assert "  no server is ready there" in capsys.readouterr().err
    assert "one each" in list(error_lines(PicoError(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")))[1]
    assert len(list(error_lines(PicoError(grpc.StatusCode.UNAVAILABLE, "draining", reason="DRAINING")))) == 1


def test_wrong_usage_is_exit_code_2() -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["generate", "hi", "--temprature", "1"])
    assert exit_.value.code == 2


def test_a_deadline_is_sent(server: FakeServer) -> None:
    assert cli.main(["generate", "forever", "--deadline", "0.3"]) == 1
    assert server.inference.deadlines[0] is not None


def test_tokenize_and_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tokenize", "ab"]) == 0
    assert capsys.readouterr().out == "97 98\n2 tokens\n"
    assert cli.main(["tokenize", "ab", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [97, 98]
    assert cli.main(["info"]) == 0
    assert "FakeForCausalLM" in capsys.readouterr().out
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "fake"


def test_status_load_and_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert "SERVING" in capsys.readouterr().out
    assert cli.main(["status", "--watch"]) == 0
    assert capsys.readouterr().out.splitlines() == ["SERVING", "DRAINING", "STOPPED"]
    assert cli.main(["load"]) == 0
    assert "7 used, 5 reusable, 40 in all" in capsys.readouterr().out
    assert cli.main(["requests"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 live requests"


def test_drain_undrain_and_shutdown(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain", "--lame-duck", "0", "--timeout", "2", "--wait"]) == 0
    assert capsys.readouterr().out.splitlines() == ["DRAINING"]
    assert cli.main(["undrain"]) == 0
    assert capsys.readouterr().out == "SERVING\n"
    assert cli.main(["shutdown", "--immediate", "--wait"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "STOPPED"
    drain, shutdown = server.admin.requests
    assert (drain.HasField("lame_duck"), drain.timeout.seconds) == (True, 2)
    assert shutdown.immediate


def test_flush(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flush"]) == 0
    assert capsys.readouterr().out == "5 KV blocks freed, 7 held by live requests\n"
    assert cli.main(["flush", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"kv_blocks_freed": "5", "kv_blocks_held": "7"}
    assert len(server.admin.requests) == 2


def test_cancel(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cancel", "r1"]) == 0
    assert cli.main(["cancel", "--all"]) == 0
    assert [request.WhichOneof("target") for request in server.admin.requests] == ["ids", "all"]
    assert capsys.readouterr().out == "1 cancelled\n1 cancelled\n"


def test_output_into_a_closed_pipe_is_no_traceback(server: FakeServer) -> None:
    command = f"{sys.executable} -m clients generate forever --address {server.address} | head -c 3"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "The"
    assert done.stderr == ""
    assert server.inference.cancelled.wait(5)


def test_the_client_needs_nothing_of_the_server() -> None:
    server_side = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "engine", "kernels", "service"}
    code = "import sys, clients.cli, clients.aio; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert server_side.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("option", [["--token-ids"], ["--top-logprobs", "2"]])
def test_what_plain_output_cannot_show_is_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "x", *option])
    assert ended.value.code == 2
    assert "needs --json" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("picovllm ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--max-tokens", "-1"], ["generate", "x", "--n", "4294967296"],
        ["generate", "x", "--seed", "-1"],
        ["generate", "x", "--priority", "2147483648"], ["generate", "x", "--deadline", "nan"],
        ["drain", "--lame-duck", "1e30"], ["shutdown", "--timeout", "inf"], ["chat", "--top-k", "1.5"],
    ],
)
def test_numbers_that_no_request_can_hold_are_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert f"argument {arguments[-2]}" in capsys.readouterr().err
