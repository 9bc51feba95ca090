"""The sampler once more, one row at a time in float64 numpy, written from the definitions: the oracle of this directory."""

import numpy as np

from mini_engine.sampling.row import SamplingRow


def processed(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """One row's logits after processors and penalties."""
    x = logits.astype(np.float64).copy()
    p, output = row.params, list(row.output_token_ids)
    if p.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in p.allowed_token_ids:
                x[token] = -np.inf
    for word in p._bad_words_token_ids or []:
        if output[len(output) - (len(word) - 1) :] == word[:-1] and len(word) <= len(output) + 1:
            x[word[-1]] = -np.inf
    if row.position < p.min_tokens:
        x[list(p._all_stop_token_ids)] = -np.inf
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in set(row.prompt_token_ids) | set(output):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return x


def distribution(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """One row's probabilities after everything; logits without ties."""
    p = row.params
    x = processed(logits, row)
    if p.is_greedy:
        return np.eye(len(x))[x.argmax()]
    x = x / p.temperature
    probs = np.exp(x - x.max())
    probs[probs < p.min_p] = 0
    order = np.argsort(-probs, kind="stable")
    if p.top_k > 0:
        probs[order[p.top_k :]] = 0
    probs /= probs.sum()
    if p.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= p.top_p]] = 0  # the token that crosses p has less than p before it: kept
    return probs / probs.sum()
