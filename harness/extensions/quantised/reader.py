"""Quantised checkpoints as the core reads them."""

from pathlib import Path

from harness.extensions.quantised.checkpoint import QuantisedCheckpoint
from harness.extensions.quantised.folder import checkpoint_of_quantised, is_quantised, open_source
from harness.formats.checkpoint.cache import cache_dir
from harness.formats.checkpoint.checkpoint import CONFIG_NAME, Checkpoint
from harness.formats.checkpoint.converted import QuantisedSource
from harness.formats.checkpoint.locate import Reader


class QuantisedReader(Reader):
    """Reads a checkpoint whose config has a `quantization_config`."""

    def reads(self, path: Path) -> bool:
        """See `Reader.reads`; raises HarnessError (BAD_CONFIG) as `Checkpoint.config`."""
        return (path / CONFIG_NAME).is_file() and is_quantised(path)

    def convert(self, path: Path, origin: Checkpoint | None = None) -> Path:
        """See `Reader.convert`; raises HarnessError as `checkpoint_of_quantised`."""
        return checkpoint_of_quantised(path, cache_dir() / "dequantised")

    def open_source(self, source: QuantisedSource) -> QuantisedCheckpoint:
        """Return the quantised checkpoint that a folder was made of; raises HarnessError as `folder.open_source`."""
        return open_source(source)


READER = QuantisedReader()
