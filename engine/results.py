"""Results of library calls: the events of each request put together."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.outputs import (
    Event,
    FailReason,
    FinishReason,
    OutputFinished,
    PromptLogprobs,
    RequestDone,
    Started,
    TokenLogprob,
    TokenOutput,
    Usage,
)


@dataclass(slots=True)
class OutputResult:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class GenerationResult:
    """``error`` is set when the request failed; ``outputs`` then hold what there was."""

    outputs: list[OutputResult] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    usage: Usage | None = None
    seed: int | None = None
    error: FailReason | None = None

    @property
    def token_ids(self) -> list[int]:
        """The first output's tokens."""
        return self.outputs[0].token_ids

    def output(self, index: int) -> OutputResult:
        while len(self.outputs) <= index:
            self.outputs.append(OutputResult())
        return self.outputs[index]


def collect_results(events: Iterable[Event], count: int) -> list[GenerationResult]:
    """Results of the requests "0", "1", ... in order."""
    results = [GenerationResult() for _ in range(count)]
    for event in events:
        result = results[int(event.request_id)]
        match event:
            case Started():
                result.seed = event.seed
            case PromptLogprobs():
                result.prompt_logprobs.extend(event.entries)
            case TokenOutput():
                output = result.output(event.output_index)
                output.token_ids.append(event.token_id)
                if event.logprob is not None:
                    output.logprobs.append(event.logprob)
            case OutputFinished():
                output = result.output(event.output_index)
                output.finish_reason, output.stop_token_id = event.reason, event.stop_token_id
            case RequestDone():
                result.usage, result.error = event.usage, event.error
    return results
