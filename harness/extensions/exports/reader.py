"""Exports of graph engines as the core reads them."""

from pathlib import Path

from harness.errors import Code, HarnessError
from harness.extensions.exports import checkpoint_of_export, is_export
from harness.extensions.quantised.folder import checkpoint_of_quantised
from harness.formats.checkpoint.cache import cache_dir
from harness.formats.checkpoint.checkpoint import Checkpoint
from harness.formats.checkpoint.locate import Reader


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
