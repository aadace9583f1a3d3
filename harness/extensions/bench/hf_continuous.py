"""HuggingFace's continuous batching: what `generate_batch` does, with a length for each request."""

import inspect
from importlib.util import find_spec
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from harness.errors import Code, HarnessError
from harness.extensions.bench.hf_generate import load_hf_model
from harness.extensions.bench.peer import BenchConfig, Generation, PeerMissingError
from harness.extensions.bench.workload import BenchWorkload

PAGE_SIZE = 256
TIMEOUT_SECONDS = 600


def _page_size_field(config: type) -> str:
    """Return what a page's size is called; transformers 5.17 calls a page a block."""
    return "page_size" if "page_size" in inspect.signature(config).parameters else "block_size"


class HfContinuousPeer:
    """A manager that is made and warmed up before the clock starts.

    Raises:
        PeerMissingError: transformers 5.17 on a CPU, without psutil: it takes the machine's memory for nothing.
    """

    name = "hf-continuous"
    shows_steps = False

    def __init__(self, setting: BenchConfig) -> None:
        page_size = _page_size_field(ContinuousBatchingConfig)
        if page_size == "block_size" and setting.device == "cpu" and find_spec("psutil") is None:
            raise PeerMissingError("this transformers needs psutil on a CPU", package="psutil")
        self._model = load_hf_model(setting)
        self._config = ContinuousBatchingConfig(
            **{page_size: PAGE_SIZE},
            num_blocks=1 + setting.max_requests + setting.max_total_len // PAGE_SIZE,
            max_batch_tokens=max(2048, setting.max_request_len),
            allow_block_sharing=False,
        )

    def generate(self, workload: BenchWorkload) -> Generation:
        """See `Peer.generate`."""
        greedy = GenerationConfig(do_sample=False, max_new_tokens=max(workload.output_lens), eos_token_id=-1)
        with (
            torch.no_grad(),
            self._model.continuous_batching_context_manager(
                generation_config=greedy, continuous_batching_config=self._config
            ) as manager,
        ):
            generation = Generation()
            names = [
                manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=-1)
                for prompt, length in zip(workload.prompts, workload.output_lens, strict=True)
            ]
            results: dict[str, Any] = {}
            while len(results) < len(names):
                result = manager.get_result(timeout=TIMEOUT_SECONDS)
                if result is None:
                    what = "HuggingFace's continuous batching ended without an answer"
                    raise HarnessError(Code.ENGINE_FAILED, what, where=self.name, actual=f"{len(results)} results")
                if result.is_finished():
                    results[result.request_id] = result
            generation.end_step()
        generation.token_ids = [list(results[name].generated_tokens) for name in names]
        return generation

    def close(self) -> None:
        """See `Peer.close`."""
        del self._model
