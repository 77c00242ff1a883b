"""GetModelInfo's answer."""

from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.calls import MAX_REQUEST_SECONDS
from service.messages import duration
from service.options import ServeOptions
from service.served_model import ServedModel
from service.tokenizer import Tokenizer
from service.version import server_version

MAX_REQUEST_BYTES = 4 << 20


def model_info_message(model: ServedModel, tokenizer: Tokenizer, options: ServeOptions) -> pb.GetModelInfoResponse:
    limits = model.limits
    return pb.GetModelInfoResponse(
        model=options.served_model_name,
        architecture=model.architecture,
        model_fingerprint=model.fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        dtype=model.dtype,
        device=model.device,
        server_version=server_version(),
        eos_token_ids=model.eos_token_ids,
        limits=pb.ModelLimits(
            vocab_size=limits.vocab_size,
            max_context_tokens=limits.max_model_len,
            kv_capacity_tokens=limits.num_blocks * limits.block_size,
            kv_block_tokens=limits.block_size,
            max_running_outputs=limits.max_num_seqs,
            max_queued_requests=options.engine.max_queued_requests,
            max_queued_tokens=options.engine.max_queued_tokens,
            max_request_bytes=MAX_REQUEST_BYTES,
            max_request_duration=duration(MAX_REQUEST_SECONDS),
        ),
        features=pb.ModelFeatures(
            chat=tokenizer.chat_template is not None, constraint=False, prefix_cache=options.engine.prefix_cache
        ),
        default_sampling=_sampling(model),
        deterministic=False,
    )


def _sampling(model: ServedModel) -> pb.Sampling:
    params = model.default_sampling
    return pb.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        n=params.n,
    )
