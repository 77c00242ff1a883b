"""ServedModel: what the front knows of the engine's model. Free of torch, so that the front is, too."""

from dataclasses import dataclass
from typing import Protocol

from engine.limits import Limits
from engine.sampling_params import SamplingParams


class EngineModelInfo(Protocol):
    """The part of the engine's ModelInfo that is shown to clients."""

    @property
    def architecture(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def default_sampling(self) -> SamplingParams: ...
    @property
    def pipeline_depth(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Picklable; crosses from the engine process to the front once, when the model is ready."""

    architecture: str
    fingerprint: str
    dtype: str
    device: str
    limits: Limits
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    pipeline_depth: int

    @classmethod
    def of(cls, info: EngineModelInfo) -> "ServedModel":
        return cls(
            architecture=info.architecture,
            fingerprint=info.fingerprint,
            dtype=info.dtype,
            device=info.device,
            limits=info.limits,
            eos_token_ids=tuple(info.eos_token_ids),
            default_sampling=info.default_sampling,
            pipeline_depth=info.pipeline_depth,
        )
