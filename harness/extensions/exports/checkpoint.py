"""Exports of graph engines with weights in few bits, as checkpoints: their own weights are then the truth."""

from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.quantised.folder import checkpoint_of_quantised
from harness.formats.checkpoint.cache import cache_dir
from harness.formats.checkpoint.checkpoint import Checkpoint
from harness.formats.checkpoint.converted import folder_name, made_once, read_info
from harness.formats.checkpoint.locate import Reader

_ONNX, _OPENVINO = ("model.onnx", "genai_config.json"), ("openvino_model.xml", "openvino_model.bin")
NAME = "exports"
"""The reader's name among the entry points."""
_VERSION = 3
"""Part of a folder's name: raise it with every change of what is written."""


def is_export(folder: Path) -> bool:
    """Whether a folder holds an export of ONNX Runtime GenAI or of OpenVINO."""
    return any(all((folder / name).is_file() for name in names) for names in (_ONNX, _OPENVINO))


def exported_folder(folder: Path) -> Path | None:
    """Return the export that a folder was written from; None if it was not."""
    info = read_info(folder)
    source = info.get("source")
    return Path(source) if info.get("reader") == NAME and isinstance(source, str) else None


def checkpoint_of_export(export: Path, origin: Checkpoint, cache: Path) -> Path:
    """Return the folder with an export's weights as a quantised checkpoint, made first where `cache` lacks it.

    Raises:
        HarnessError: PACKAGE_MISSING (onnx, openvino); UNKNOWN_QUANTISATION: an operator is not read, or nothing is
            quantised; QUANTISED_MISFIT: a weight has no place in the checkpoint `origin` that the export was made from.
    """
    files = [*export.iterdir(), *(path for path in origin.folder.iterdir() if path.suffix in (".json", ".safetensors"))]
    folder = cache / folder_name(_VERSION, files, str(export))
    return made_once(folder, NAME, lambda made: _write(export, origin, made))


def _write(export: Path, origin: Checkpoint, made: Path) -> dict[str, Any]:
    from harness.extensions.exports import onnx_graph, openvino_graph
    from harness.extensions.exports.packed import refuse, write_packed

    reader = onnx_graph if (export / _ONNX[0]).is_file() else openvino_graph
    graph = export / reader.GRAPH_NAME
    try:
        weights = list(reader.packed_weights(export))
    except (OSError, KeyError, IndexError, ValueError, RuntimeError, TypeError) as error:
        refuse("the export cannot be read", graph, actual=f"{type(error).__name__}: {error}"[:200])
    if not weights:
        hint = f"--model {origin.folder} --engine-option export={export}"
        refuse("no weight of the export is in few bits", export, actual="floats", hint=hint)
    write_packed(weights, origin, made, graph)
    return {"source": str(export.resolve())}


class ExportReader(Reader):
    """Reads the export of ONNX Runtime GenAI or OpenVINO, beside the checkpoint that it was made from."""

    takes_origin = True

    def reads(self, path: Path) -> bool:
        """See `Reader.reads`."""
        return is_export(path)

    def convert(self, path: Path, origin: Checkpoint | None = None) -> Path:
        """See `Reader.convert`.

        Raises:
            HarnessError: BAD_OPTION: the checkpoint that the export was made from is not named; as
                `checkpoint_of_export` and `checkpoint_of_quantised`.
        """
        if origin is None:
            what, hint = "an export does not say all of the model that it was made from", "name that one as --hf"
            raise HarnessError(Code.BAD_OPTION, what, where="--model", actual=path, hint=hint)
        packed = checkpoint_of_export(path.absolute(), origin, cache_dir() / "exports")
        return checkpoint_of_quantised(packed, cache_dir() / "dequantised")


READER = ExportReader()
