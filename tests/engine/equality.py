"""The equality rule: two paths whose numerics differ may part only where the reference hardly cares.

At the first token that differs, the reference's two best scores must be closer than a margin; that prompt then stops.
At most a small share of prompts may stop.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FLOAT32_MARGIN = 1e-4
FLOAT32_MAX_STOPPED = 0.05

Scores = Callable[[int, list[int]], Tensor]


def check_equal_by_rule(
    ours: Sequence[list[int]], reference: Sequence[list[int]], scores: Scores, max_stopped: float = FLOAT32_MAX_STOPPED
) -> int:
    """Compare token lists; ``scores(i, tokens)`` are prompt i's reference scores after generating ``tokens``.

    Returns how many prompts stopped at a near tie.
    """
    assert len(ours) == len(reference)
    stopped = 0
    for i, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        if mine == theirs:
            continue
        at = next((k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        assert at is not None, f"prompt {i}: lengths {len(mine)} and {len(theirs)} differ without a differing token"
        best = scores(i, theirs[:at]).topk(2).values
        margin = float(best[0] - best[1])
        assert margin < FLOAT32_MARGIN, f"prompt {i}, token {at}: {mine[at]} is not {theirs[at]}, margin {margin:.2e}"
        stopped += 1
        print(f"prompt {i} stops at token {at}: the reference's margin is {margin:.1e}")
    assert stopped <= max(max_stopped * len(ours), 1), f"{stopped} of {len(ours)} prompts stopped at near ties"
    return stopped


def check_greedy_by_rule(
    ours: Sequence[list[int]],
    scores_along: Callable[[int, list[int]], Tensor],
    max_stopped: float = FLOAT32_MAX_STOPPED,
) -> int:
    """Our greedy tokens are the reference's own, token by token, by induction.

    ``scores_along(i, tokens)`` are the reference's scores [len(tokens), V] before each of prompt i's ``tokens``: as
    long as every token is the best one there, the reference would have generated the same. Returns how many stopped.
    """
    stopped = 0
    for i, tokens in enumerate(ours):
        scores = scores_along(i, tokens)
        wrong = (scores.argmax(-1) != torch.tensor(tokens)).nonzero().flatten().tolist()
        if wrong:
            best = scores[wrong[0]].topk(2).values
            margin = float(best[0] - best[1])
            assert margin < FLOAT32_MARGIN, f"prompt {i}, token {wrong[0]} is not the reference's, margin {margin:.2e}"
            stopped += 1
            print(f"prompt {i} stops at token {wrong[0]}: the reference's margin is {margin:.1e}")
    assert stopped <= max(max_stopped * len(ours), 1), f"{stopped} of {len(ours)} prompts stopped at near ties"
    return stopped
