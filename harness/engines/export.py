"""The export of a checkpoint that a graph engine runs, `--engine-option export=DIR`."""

from collections.abc import Mapping
from pathlib import Path

from harness.engines.adapter import refuse_unknown_options
from harness.errors import Code, HarnessError


def export_folder(
    engine: str, options: Mapping[str, str], *, graph: str, command: str, served: Path | None = None
) -> Path:
    """Return the folder of the export that the engine's options name, or `served`, in which there is a file `graph`.

    Raises:
        HarnessError: BAD_OPTION: an option is unknown, or there is no such folder.
    """
    refuse_unknown_options(engine, options, ("export",))
    export = Path(options.get("export", served or ""))
    if not (export / graph).is_file():
        raise HarnessError(
            Code.BAD_OPTION,
            f"the engine {engine} runs an export of the checkpoint, which is not there",
            where="--engine-option export=",
            expected=f"a folder with {graph}",
            actual=options.get("export", "none"),
            hint=command,
        )
    return export
