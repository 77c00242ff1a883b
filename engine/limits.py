"""Limits: what a request may ask for. Pure arithmetic, shared by the engine and whoever admits for it."""

from dataclasses import dataclass

from engine.errors import ExceedsKVCapacity, InvalidRequest, PromptTooLong
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_model_len`` tokens of context; a KV pool of ``num_blocks`` blocks of ``block_size`` tokens."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int

    def blocks_for(self, prompt_tokens: int, max_tokens: int, n: int) -> int:
        """KV blocks the request holds at its end: full prompt blocks are shared by the n outputs.

        The last sampled token is never fed back, so its KV is never written.
        """
        written = prompt_tokens + max(max_tokens - 1, 0)
        shared = prompt_tokens // self.block_size
        return shared + n * (-(-written // self.block_size) - shared)

    def resolve_max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        """The request's max_tokens: as set, or the room left in context and pool for all n outputs.

        Raises `PromptTooLong`, `ExceedsKVCapacity`, or `InvalidRequest` when n outputs cannot run at once.
        """
        if prompt_tokens == 0:
            raise InvalidRequest([("prompt_token_ids", "must hold at least one token")])
        if params.n > self.max_num_seqs:
            raise InvalidRequest([("n", f"must be at most max_num_seqs {self.max_num_seqs}, got {params.n}")])
        wanted = 1 if params.max_tokens is None else params.max_tokens
        if prompt_tokens + wanted > self.max_model_len:
            raise PromptTooLong(prompt_tokens + wanted, self.max_model_len)
        if (blocks := self.blocks_for(prompt_tokens, wanted, params.n)) > self.num_blocks:
            raise ExceedsKVCapacity(blocks, self.num_blocks)
        if params.max_tokens is not None:
            return params.max_tokens
        shared = prompt_tokens // self.block_size
        own_blocks = (self.num_blocks - shared) // params.n
        room_in_pool = (shared + own_blocks) * self.block_size - prompt_tokens + 1
        room = min(self.max_model_len - prompt_tokens, room_in_pool)
        if params.min_tokens > room:
            raise InvalidRequest([("min_tokens", f"{params.min_tokens} is above the {room} tokens there is room for")])
        return room
