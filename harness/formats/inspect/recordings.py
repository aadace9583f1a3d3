"""What a recording, a golden, or a folder of dumped tensors holds, as JSON-able tables."""

from collections import Counter
from pathlib import Path
from typing import Any

from harness.formats.recording import Recording
from harness.formats.tensors.folder import read_tensors


def recording_tables(path: Path) -> dict[str, Any]:
    """Describe a recording or golden; the tensors are not read, nor their digests checked.

    Raises:
        HarnessError: as `Recording.open`, and for a step file that is missing or damaged.
    """
    with Recording.open(path, verify=False) as recording:
        manifest, steps, rows = recording.manifest, recording.steps, Counter[str]()
        for step in steps:
            for name in step.tap_names:
                own = step.rows_of(name)
                rows[name] += step.entry.num_rows if own is None else len(own)
        return {
            "schema_version": 1,
            "kind": "golden" if manifest.producer.name == "harness.oracle" else "recording",
            "path": str(path),
            "summary": {
                "producer": f"{manifest.producer.name} {manifest.producer.version}",
                "model": manifest.model.id,
                "dtype": manifest.dtype,
                "device": manifest.device,
                "schedule": manifest.schedule,
                "rank": manifest.rank,
                "world_size": manifest.world_size,
                "num_bytes": sum(step.entry.num_bytes for step in steps),
            },
            "requests": [
                {
                    "id": request.id,
                    "prompt_length": request.prompt_length,
                    "num_tokens": len(request.token_ids),
                    "draft_of": request.draft_of,
                }
                for request in manifest.requests
            ],
            "steps": [
                {"phase": phase, "num_steps": len(entries), "num_rows": sum(entry.num_rows for entry in entries)}
                for phase in dict.fromkeys(step.phase for step in steps)
                if (entries := [step.entry for step in steps if step.phase == phase])
            ],
            "taps": [
                {"name": tap.name, "dtype": tap.dtype, "shape": list(tap.shape), "num_rows": rows[tap.name]}
                for tap in manifest.taps
            ],
        }


def tensor_tables(path: Path) -> dict[str, Any]:
    """Describe a folder of dumped tensors.

    Raises:
        HarnessError: as `read_tensors`.
    """
    found = read_tensors(path)
    tensors = [
        {
            "name": tensor.name,
            "dtype": str(tensor.tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.tensor.shape),
        }
        for tensor in found.tensors
    ]
    return {
        "schema_version": 1,
        "kind": "tensors",
        "path": str(path),
        "tensors": tensors,
        "left_out": list(found.left_out),
    }
