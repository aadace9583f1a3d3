"""An installed engine, timed through what its adapter offers."""

from collections.abc import Mapping

from harness.engines import open_engine
from harness.engines.continuation import Continuation
from harness.engines.reference.errors import parse_reference_options, reference_errors
from harness.extensions.bench.peer import OURS, BenchConfig, Generation
from harness.extensions.bench.workload import BenchWorkload
from reference_engine import EngineConfig
from reference_engine.launch import choose_backend

STEP_TOKENS = EngineConfig().max_num_batched_tokens
"""Tokens of a step, for every engine that lets us choose."""


class EnginePeer:
    """An engine with steps, or with `generate`."""

    def __init__(self, name: str, setting: BenchConfig) -> None:
        """Open the engine.

        Raises:
            HarnessError: as `open_engine`; ENGINE_LACKS_METHOD.
        """
        options = setting.options_of(name)
        if name == OURS:
            options = choose_backend(options, folder=setting.folder, device=setting.device).options
            options = {**_reference_sizes(setting, options), **options}
        engine = open_engine(name, setting.folder, dtype=setting.dtype, device=setting.device, options=options)
        self.name = name
        self._continuation = Continuation(engine, max_num_tokens=STEP_TOKENS, max_num_seqs=setting.max_requests)
        self.shows_steps = self._continuation.shows_steps

    def generate(self, workload: BenchWorkload) -> Generation:
        """See `Peer.generate`."""
        generation = Generation(token_ids=[[] for _ in workload.prompts])
        for new_tokens in self._continuation.steps(workload.prompts, workload.output_lens):
            for prompt, token in new_tokens:
                generation.token_ids[prompt].append(token)
            generation.end_step()
        return generation

    def close(self) -> None:
        """See `Peer.close`."""
        self._continuation.close()


def _reference_sizes(setting: BenchConfig, options: Mapping[str, str]) -> dict[str, str]:
    """Return options by which all requests fit into the reference engine's cache at once."""
    with reference_errors("EngineConfig"):
        block_size = int(parse_reference_options(options).get("block_size", EngineConfig().block_size))
    # The last block of a request is filled in part only, and no request can have block 0.
    num_blocks = 1 + setting.max_requests + setting.max_total_len // max(1, block_size)
    return {"max_model_len": str(setting.max_request_len), "num_blocks": str(num_blocks)}
