import json
from pathlib import Path

from scripts.generate_protos import ROOT, stale_files


def test_generated_code_is_up_to_date() -> None:
    assert stale_files() == []


def test_no_proto_imports_another_of_ours() -> None:
    """The generator's include path and buf's module root differ, so such an import could not satisfy both."""
    lines = (line for path in ROOT.glob("protos/**/*.proto") for line in path.read_text(encoding="utf-8").splitlines())
    imported = [line for line in lines if line.startswith("import ")]
    assert imported
    assert all('"google/protobuf/' in line for line in imported)


def test_every_rpc_and_field_has_a_comment() -> None:
    undocumented = []
    for path in sorted(ROOT.glob("protos/**/*.proto")):
        previous = ""
        for number, line in enumerate(map(str.strip, path.read_text(encoding="utf-8").splitlines()), 1):
            is_field = line.endswith(";") and "= " in line and not line.startswith(("option ", "syntax "))
            is_entry = is_field or line.startswith(("rpc ", "message ", "enum ", "service "))
            if is_entry and not previous.startswith("//"):
                undocumented.append(f"{path.name}:{number}: {line}")
            previous = line
    assert undocumented == []


def test_the_service_config_names_services_that_exist() -> None:
    from clients.channel import SERVICE_CONFIG
    from protos.picovllm.inference.v1 import inference_pb2

    config = json.loads(SERVICE_CONFIG)
    service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    assert config["healthCheckConfig"]["serviceName"] == service
    assert [name["service"] for method in config["methodConfig"] for name in method["name"]] == [service]
    assert Path(inference_pb2.DESCRIPTOR.name) == Path("protos/picovllm/inference/v1/inference.proto")
