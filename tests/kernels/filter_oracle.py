"""What top_k, top_p and min_p let through, spelled out in plain Python."""

import math
from collections.abc import Sequence


def allowed_ids(logits: Sequence[float], top_k: int, top_p: float, min_p: float) -> tuple[set[int], bool]:
    """The ids that stay, ranked by (logit, lowest id); and whether a threshold is too near to call in float32."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        ranked = ranked[:top_k]
    best = logits[ranked[0]]
    weights = [math.exp(logits[token] - best) for token in ranked]
    wanted, before, stay, near = top_p * math.fsum(weights), 0.0, set(), False
    for token, weight in zip(ranked, weights, strict=True):
        near |= top_p < 1 and abs(before - wanted) < 1e-5 * wanted
        near |= min_p > 0 and weight != 1 and abs(weight - min_p) < 1e-5 * min_p
        if token == ranked[0] or ((top_p >= 1 or before < wanted) and weight >= min_p):
            stay.add(token)
        before += weight
    return stay, near
