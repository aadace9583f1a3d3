"""Requests side by side: how many tokens are run at once, and their padding."""

from collections.abc import Sequence

import torch

from harness.formats.recording import RequestInfo
from harness.oracle.model import HFModel
from harness.oracle.untraced import frequencies_follow_length

_ACTIVATION_BYTES = 256 << 20
"""Memory for the widest activations of a batch, in float64."""
_LIVE_VALUES = 8
"""Values of that width that are held at a time."""
_LEAST_TOKENS = 512


def batch_requests(hf: HFModel, requests: Sequence[RequestInfo]) -> list[list[RequestInfo]]:
    """Group requests, in their order, so that the activations of a group fit into memory beside one layer.

    A request with images is alone.
    """
    groups: list[list[RequestInfo]] = []
    longest = 0
    for request in requests:
        longest = max(longest, len(request.token_ids))
        is_alone = bool(groups) and (request.inputs or groups[-1][-1].inputs)
        if groups and not is_alone and longest * (len(groups[-1]) + 1) <= batch_tokens(hf):
            groups[-1].append(request)
        else:
            groups.append([request])
            longest = len(request.token_ids)
    return groups


def batch_tokens(hf: HFModel) -> int:
    """Return how many tokens are run at once: as many as memory is meant for, and 512 at least.

    One, so that every request is run alone, where HF chooses rotary frequencies by the longest request beside it.
    """
    if frequencies_follow_length(hf.config):
        return 1
    widest = max((parameter.shape[0] for parameter in hf.model.parameters() if parameter.dim() == 2), default=1)
    sizes = (getattr(hf.config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner", "hidden_size"))
    width = min(widest, max((size for size in sizes if isinstance(size, int)), default=widest))
    return max(_LEAST_TOKENS, _ACTIVATION_BYTES // (_LIVE_VALUES * 8 * max(1, width)))


def padded(requests: Sequence[RequestInfo]) -> torch.Tensor:
    """Return the tokens of some requests, [requests, tokens], the shorter ones padded after their end."""
    longest = max(len(request.token_ids) for request in requests)
    return torch.tensor([[*request.token_ids, *[0] * (longest - len(request.token_ids))] for request in requests])
