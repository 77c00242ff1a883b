"""How one output ends: by the engine's word, or by a stop string that its last half character completes."""

from engine.outputs import FinishReason, OutputFinished
from engine.sampling_params import SamplingParams
from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.output_progress import OutputProgress
from service.prompts import TokenPrompt
from service.stop_strings import StopAutomaton
from service.validate import Generation
from tests.service.text_tables import table_of


def ended(stops: tuple[str, ...]) -> pb.Output:
    """An output of one token that ends in half a character, ended by max_tokens."""
    generation = Generation(
        prompt=TokenPrompt([0]), params=SamplingParams(), stop_strings=stops, include_stop_in_text=False, text=True,
        token_ids=True, skip_special_tokens=True, echo=False, priority=0, queue_timeout=None, max_duration=None,
    )  # fmt: skip
    table = table_of(["ab \U0001f600".encode()[:-1]])
    output = OutputProgress(0, generation, table, StopAutomaton(stops), "", lambda index, count: None)
    output.on_tokens([0], None, False)
    output.on_finished(OutputFinished("r", 0, FinishReason.LENGTH, 1))
    return output.whole()


def test_without_a_stop_string_it_is_the_length() -> None:
    output = ended(())
    assert (output.text, output.finish_reason) == ("ab \ufffd", pb.FINISH_REASON_LENGTH)


def test_a_stop_string_completed_by_the_end_is_a_stop() -> None:
    output = ended((" \ufffd",))
    assert (output.text, output.finish_reason) == ("ab", pb.FINISH_REASON_STOP)
    assert output.stop_match.stop_text == " \ufffd"
    assert list(output.token_ids) == [0]
