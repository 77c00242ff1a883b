"""One end-to-end test on the default model: a fresh server, a chat, an answer that makes sense."""

from pathlib import Path

import pytest

from protos.picovllm.admin.v1 import admin_pb2
from protos.picovllm.inference.v1 import inference_pb2 as pb
from tests.service.results import both
from tests.service.rpc import generate, spec
from tests.service.server_process import ServerProcess


def test_the_default_model_answers(tmp_path: Path, smollm2_dir: Path) -> None:
    server = ServerProcess(tmp_path, "--model", "smollm2", "--num-gpu-blocks", "512", "--lame-duck", "0")
    try:
        stub = server.stub()
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")])
        result = both(stub, spec(chat=chat, max_tokens=32, output=pb.OutputOptions(token_ids=True)))
        (output,) = result.outputs
        assert output.text == "The capital of France is Paris."
        assert output.stop_match == pb.StopMatch(eos_token_id=2)
        assert output.visible_token_count == len(output.token_ids) - 1
        assert generate(stub, spec("The capital of France is", max_tokens=2)).outputs[0].text == " Paris."
        stopping = pb.Stopping(max_tokens=32, stop_strings=["France is P"])
        stopped = both(stub, spec(chat=chat, stopping=stopping)).outputs[0]
        assert (stopped.text, stopped.stop_match.stop_text) == ("The capital of ", "France is P")
        assert stub.GetModelInfo(pb.GetModelInfoRequest()).model == "smollm2"
        assert "KV cache: 512 blocks of 16 tokens = 8192 tokens" in server.log
        assert server.wait_idle().kv_blocks_used == 0
        server.admin.Shutdown(admin_pb2.ShutdownRequest())
        assert server.wait(15) == 0
    finally:
        server.close()


def test_the_default_model_is_explained_when_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from engine.errors import ModelError
    from service import model_source

    monkeypatch.setattr(model_source, "ROOT", tmp_path)
    with pytest.raises(ModelError, match="in a clone of picovllm only"):
        model_source.model_directory("smollm2")
    (tmp_path / "Makefile").touch()
    with pytest.raises(ModelError, match="does not exist yet; make it with: make models"):
        model_source.model_directory("smollm2")


def test_missing_packages_of_the_server_are_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from service import __main__ as command

    monkeypatch.setattr(command, "find_spec", lambda name: None if name in ("torch", "jinja2") else object())
    assert command.main(["--model", "smollm2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "(torch, jinja2)" in line
    assert "serve" in line


def test_a_hub_id_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.errors import ModelError
    from service import model_source

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError) as caught:
        model_source.model_directory("nobody/nothing-at-all")
    assert "could not be downloaded" in str(caught.value)
    assert "\n" not in str(caught.value)
