"""Corpora of the Hugging Face hub: the ones known by name, and the files of any repository. Imports no torch.

files, origin = hub_files("fineweb-edu", "HuggingFaceFW/fineweb-edu", "sample-10BT", "train", None)
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from gpt2.files.cache import DataError, cache_dir

OLDEST = (5, 0, 1)
"""Oldest version of `datasets` whose positions stay valid when resumed from repeatedly."""
INSTALL = "pip install 'gpt2-bench[corpora]'"


@dataclass(frozen=True, kw_only=True)
class KnownCorpus:
    """A corpus of the Hugging Face hub."""

    path: str
    config: str | None = None
    validation: str | None = None
    """Name of its validation split, or None where it has none."""
    tokens: float
    """Approximate number of tokens in the training split, used only to estimate the time left."""

    def split(self, name: str, asked: str) -> str:
        """Return the corpus's own name of the split train or validation. Raises DataError without one."""
        if asked == "train":
            return asked
        if self.validation is None:
            instead = "its first shard is its validation"
            raise DataError(f"corpus {name!r} has no validation split of its own; {instead}")
        return self.validation


KNOWN = {
    "fineweb-edu": KnownCorpus(path="HuggingFaceFW/fineweb-edu", config="sample-10BT", tokens=10e9),
    "fineweb": KnownCorpus(path="HuggingFaceFW/fineweb", config="sample-10BT", tokens=10e9),
    "openwebtext": KnownCorpus(path="Skylion007/openwebtext", tokens=9.0e9),
    "tinystories": KnownCorpus(path="roneneldan/TinyStories", validation="validation", tokens=4.7e8),
}


def import_datasets() -> Any:
    """Import the package `datasets` with its progress bars and logging off.

    Raises DataError where it is not installed or too old, or there is no place for its locks.
    """
    if not (os.environ.get("HF_DATASETS_CACHE") or os.environ.get("HF_HOME")):
        # By default it takes the home directory, which may be missing, full or closed.
        os.environ["HF_DATASETS_CACHE"] = str(cache_dir() / "datasets")
    try:
        import datasets
    except ImportError:
        needed = "reading a corpus needs the package `datasets`, which is not installed"
        raise DataError(f"{needed}: {INSTALL}") from None
    if tuple(int(number) for number in re.findall(r"\d+", datasets.__version__)[:3]) < OLDEST:
        loses = "loses its position when gone on with twice"
        raise DataError(f"`datasets` {datasets.__version__} {loses}: {INSTALL}")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, as one line
    return datasets


def hub_files(
    name: str, repository: str, config: str | None, split: str, revision: str | None
) -> tuple[list[str], dict[str, str | None]]:
    """Return the addresses of a split's files, pinned to a commit, and their origin.

    revision: the newest commit where None. The origin is the corpus, repository, configuration and revision.
    Raises DataError where the hub is unreachable, or has no such repository, configuration or split.
    """
    try:
        builder = import_datasets().load_dataset_builder(repository, config, revision=revision)
    except Exception as error:
        raise _hub_error(name, repository, error) from None
    files = builder.config.data_files or {}
    if split not in files:
        others = ", ".join(files) or "none"
        raise DataError(f"corpus {name!r}: {repository} has no split {split!r}, but {others}")
    listed = [str(file) for file in files[split]]
    if commit := re.search(r"@([0-9a-f]{40})/", listed[0]):
        revision = commit[1]
    return listed, {"corpus": name, "repository": repository, "config": config, "revision": revision}


def _hub_error(name: str, repository: str, error: Exception) -> DataError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "scripts are no longer supported" in said:
        return DataError(
            f"corpus {name!r}: {repository} is read by a script there, which `datasets` no longer runs; "
            "try --revision refs/convert/parquet, the hub's own copy in Parquet"
        )
    if isinstance(error, ValueError):  # an unknown configuration
        return DataError(f"corpus {name!r}: {said}")
    if re.search(r"\b40[134]\b|doesn't exist on the Hub", said):
        return DataError(
            f"corpus {name!r}: {repository} is no path here, and does not exist on the hub or asks for an "
            "account (hf auth login)"
        )
    return DataError(
        f"corpus {name!r}: the Hugging Face hub is not reachable ({said}); check the network, or give files "
        "that you have: a .txt, .jsonl or .parquet file or a folder of such"
    )
