"""SGLang's server on a CPU without its kernels: docs/adapters/sglang/cpu.py, then `sglang.launch_server`.

python reports/cpu/sglang_server.py --model-path FOLDER --port PORT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "adapters" / "sglang"))
import cpu  # noqa: F401 - SGLang's processes import this file again

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    options = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    options += ["--dtype", "float32", "--disable-overlap-schedule", "--max-total-tokens", "8192", "--host", "127.0.0.1"]
    launch_server(prepare_server_args([*options, *sys.argv[1:]]))
