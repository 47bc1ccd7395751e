"""Corpora as one long sequence of token ids, and the batches cut from it. Imports no torch.

corpus = open_corpus("tinyshakespeare", vocab_size=50257, path=Path("input.txt"))
batches = Batches(corpus, seq_len=1024, tokens_per_step=4096, seed=1337)
x, y = batches.sequences(step=0, first=0, count=4)          # two (4, 1024) arrays, y one token ahead of x
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from gpt2.synthetic import Synthetic

TOKEN = np.dtype("<u2")
HEADER_INTS = 256  # llm.c's shard header: int32 magic, version, number of tokens, zeros (dev/data/data_common.py)
HEADER_BYTES = 4 * HEADER_INTS
MAGIC = 20240520
VERSION = 1


class DataError(Exception):
    """A corpus that cannot be used; the message says which, why and what to do."""


class Corpus(Protocol):
    """A sequence of token ids that is read where it is needed."""

    name: str
    tokens: int | None
    """Length; None where the corpus never ends."""
    sha256: str
    """Of the tokens as little-endian uint16 (of the first 2^20 where the corpus never ends)."""
    warnings: tuple[str, ...]

    def read(self, start: int, count: int) -> np.ndarray:
        """Token ids start to start + count, as an integer array of shape (count,)."""
        ...


@dataclass(frozen=True)
class KnownCorpus:
    """A corpus that can be downloaded."""

    url: str
    text_sha256: str
    tokens_sha256: str


KNOWN = {
    "tinyshakespeare": KnownCorpus(
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        text_sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        tokens_sha256="25c01b32b32f41897a6359dd222ec114992dc30c357bcafbfe6c56672f76cd31",
    ),
}


def cache_dir() -> Path:
    """Where token shards and downloads are kept: $GPT2_CACHE_DIR, else the user's cache folder."""
    if configured := os.environ.get("GPT2_CACHE_DIR"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt2-bench"


def open_corpus(name: str, *, vocab_size: int, seed: int = 0, path: Path | None = None) -> Corpus:
    """Find the corpus `name` and make its tokens readable.

    synthetic needs nothing. Any other name is looked for at `path`, then as $GPT2_DATA_DIR/NAME(.txt|.bin|/),
    then in the cache, then downloaded where its address is known. A text file is tokenised once and cached
    by content; .bin shards of nanoGPT and llm.c are read as they are; a folder stands for its .bin shards.
    Raises DataError where nothing is found, or the tokens do not fit the vocabulary.
    """
    if name == "synthetic":
        if path is not None:
            raise DataError(f"the synthetic corpus is generated; it cannot be read from {path}")
        return Synthetic(vocab_size, seed)
    source = path if path is not None else _find(name)
    if not source.exists():
        raise DataError(f"corpus {name!r}: {source} does not exist")
    try:
        return _open_shards(name, _shard_paths(name, source), vocab_size)
    except OSError as error:
        raise DataError(f"corpus {name!r}: cannot read {error.filename or source} ({error.strerror})") from None


def _find(name: str) -> Path:
    for folder in (os.environ.get("GPT2_DATA_DIR"), cache_dir() / "corpora"):
        for suffix in (".txt", ".bin", ""):
            if folder and (candidate := Path(folder) / f"{name}{suffix}").exists():
                return candidate
    if name in KNOWN:
        return _download(name, KNOWN[name])
    raise DataError(f"corpus {name!r} is not at hand and has no known address; {_ways(name)}")


def _ways(name: str) -> str:
    return (
        f"give its place with --data PATH, or put {name}.txt, {name}.bin or a folder {name}/ of .bin shards "
        f"into $GPT2_DATA_DIR or {cache_dir() / 'corpora'}"
    )


def _download(name: str, known: KnownCorpus) -> Path:
    try:
        with urllib.request.urlopen(known.url, timeout=30) as response:
            text = response.read()
    except OSError as error:
        raise DataError(
            f"corpus {name!r} is not at hand and could not be downloaded ({error}); {_ways(name)}"
        ) from None
    if hashlib.sha256(text).hexdigest() != known.text_sha256:
        raise DataError(f"corpus {name!r}: {known.url} no longer gives the known text; {_ways(name)}")
    target = cache_dir() / "corpora" / f"{name}.txt"
    with _replacing(target) as file:
        file.write(text)
    return target


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """Write `target` whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as file:
            try:
                yield file
            except BaseException:
                Path(file.name).unlink()
                raise
        os.replace(file.name, target)
    except OSError as error:
        raise DataError(f"cannot write {target} ({error.strerror}); set GPT2_CACHE_DIR to a writable folder") from None


def _shard_paths(name: str, source: Path) -> list[Path]:
    if source.is_dir():
        shards = sorted(source.glob("*.bin"))
        shards = [shard for shard in shards if "train" in shard.name] or shards
        if not shards:
            raise DataError(f"corpus {name!r}: {source} holds no .bin shard")
        return shards
    return [source if source.suffix == ".bin" else tokenise(source)]


# --- text to tokens ---------------------------------------------------------------------------------------------

# A single newline between two words is a token of its own in GPT-2's vocabulary, so text may be cut after it
# without changing one token; anywhere else a cut could split what the tokenizer would have joined.
CUT = re.compile(r"(?<=\S)\n(?=\S)")


def tokenise(path: Path, piece_chars: int = 1 << 20) -> Path:
    """Encode a UTF-8 text file with GPT-2's vocabulary; returns the cached shard, in llm.c's format.

    The shard is named by the text's sha256. Text is read and encoded piece by piece, never held whole.
    Special tokens in the text are encoded as ordinary text. Raises DataError where the text is not UTF-8 or
    the vocabulary cannot be had.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_dir() / "tokens" / f"{digest}-gpt2.bin"
    if target.exists():
        return target
    encode = _vocabulary().encode_ordinary
    with _replacing(target) as file:
        file.write(bytes(HEADER_BYTES))
        count = 0
        for text in _pieces(path, piece_chars):
            ids = np.array(encode(text), dtype=TOKEN)
            file.write(ids.tobytes())
            count += len(ids)
        if not count:
            raise DataError(f"{path} holds no text")
        file.seek(0)
        file.write(shard_header(count))
    return target


def shard_header(tokens: int) -> bytes:
    """The 1,024 bytes before the tokens of an llm.c shard."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens
    return header.tobytes()


def _pieces(path: Path, piece_chars: int) -> Iterator[str]:
    held = ""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while chunk := file.read(piece_chars):
                held += chunk
                cuts = [match.end() for match in CUT.finditer(held)]
                if cuts:
                    yield held[: cuts[-1]]
                    held = held[cuts[-1] :]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if held:
        yield held


def _vocabulary():
    import tiktoken  # here, not above: only text needs it, and it takes a while to load

    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError is a damaged cache
        raise DataError(
            "tiktoken's GPT-2 vocabulary is not cached and could not be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder that holds it, or give .bin shards"
        ) from None


# --- shards -----------------------------------------------------------------------------------------------------


class Shards:
    """Token files read as one sequence, memory-mapped."""

    def __init__(self, name: str, arrays: list[np.ndarray], sha256: str, warnings: tuple[str, ...]) -> None:
        self.name, self.sha256, self.warnings = name, sha256, warnings
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])
        self.tokens: int | None = int(self._ends[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """See Corpus.read; the range may cross shards."""
        parts = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        start -= int(self._ends[shard - 1]) if shard else 0
        while count:
            part = self._arrays[shard][start : start + count]
            parts.append(part)
            count, start, shard = count - len(part), 0, shard + 1
        return np.concatenate(parts)


def _open_shards(name: str, paths: list[Path], vocab_size: int) -> Shards:
    arrays = [_map_shard(path) for path in paths]
    print_of = _fingerprint(paths, arrays)
    if print_of["largest"] >= vocab_size:
        raise DataError(
            f"corpus {name!r}: token id {print_of['largest']} is beyond the model's vocabulary of {vocab_size}; "
            "choose a model with the vocabulary that made the tokens"
        )
    warnings = ()
    if name in KNOWN and print_of["sha256"] != KNOWN[name].tokens_sha256:
        warnings = (f"the tokens given as {name} are not those of the known {name}; compare losses with care",)
    return Shards(name, arrays, print_of["sha256"], warnings)


def _map_shard(path: Path) -> np.ndarray:
    """Memory-map one .bin file: llm.c's by its header, else nanoGPT's, which has none."""
    size = path.stat().st_size
    if size == 0 or size % TOKEN.itemsize:
        raise DataError(f"{path}: {size} bytes are no whole number of uint16 tokens")
    if size >= HEADER_BYTES:
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
        magic, version, tokens = (int(value) for value in header[:3])
        # No text holds 506 equal tokens after its first six, so zeros there mark a header of some kind.
        if magic == MAGIC or not header[3:].any():
            if magic != MAGIC:
                raise DataError(f"{path}: header magic {magic} is not {MAGIC}, llm.c's GPT-2 token shards")
            if version != VERSION:
                raise DataError(f"{path}: llm.c shard version {version} is not {VERSION}")
            if size != HEADER_BYTES + tokens * TOKEN.itemsize:
                raise DataError(
                    f"{path}: the header promises {tokens} tokens, the file holds "
                    f"{(size - HEADER_BYTES) // TOKEN.itemsize}; it was cut off or damaged"
                )
            if not tokens:
                raise DataError(f"{path}: holds no tokens")
            return np.memmap(path, dtype=TOKEN, mode="r", offset=HEADER_BYTES)
    return np.memmap(path, dtype=TOKEN, mode="r")


def _fingerprint(paths: list[Path], arrays: list[np.ndarray]) -> dict:
    """sha256 and largest id of all tokens; read once, then remembered by path, size and time of change."""
    stats = [path.stat() for path in paths]
    identity = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, stats, strict=True)]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    remembered = cache_dir() / "fingerprints" / f"{key}.json"
    if remembered.exists():
        return json.loads(remembered.read_text())
    digest, largest = hashlib.sha256(), 0
    for array in arrays:
        for start in range(0, len(array), 1 << 24):
            part = np.ascontiguousarray(array[start : start + (1 << 24)])
            digest.update(part.data)
            largest = max(largest, int(part.max()))
    result = {"sha256": digest.hexdigest(), "largest": largest}
    with _replacing(remembered) as file:
        file.write(json.dumps(result).encode())
    return result


# --- batches ----------------------------------------------------------------------------------------------------


class Batches:
    """The global batch of every step: a function of (seed, step, tokens per step) and nothing else.

    The corpus is cut into chunks of seq_len tokens, and each epoch reads all of them in a new order drawn from
    the seed; an endless corpus is read straight on. Ranks, micro-batches and accumulation only say which
    of a step's sequences they take, so that no two take the same.
    """

    def __init__(self, corpus: Corpus, *, seq_len: int, tokens_per_step: int, seed: int) -> None:
        assert tokens_per_step % seq_len == 0
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.sequences_per_step = tokens_per_step // seq_len
        self.warnings: tuple[str, ...] = corpus.warnings
        self._chunks: int | None = None
        if corpus.tokens is not None:
            if corpus.tokens < seq_len + 1:
                raise DataError(
                    f"corpus {corpus.name!r} has {corpus.tokens} tokens, a sequence of {seq_len} needs {seq_len + 1}"
                )
            self._chunks = (corpus.tokens - 1) // seq_len
            if self._chunks < self.sequences_per_step:
                self.warnings += (
                    f"the corpus has {corpus.tokens} tokens, fewer than one step's {tokens_per_step}; "
                    "sequences repeat within a step",
                )
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def sequences(self, step: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequences first to first + count of the global batch of `step`.

        Returns inputs and targets, two int64 arrays (count, seq_len); targets are one token ahead.
        """
        assert first + count <= self.sequences_per_step
        rows = np.stack([self._row(step * self.sequences_per_step + first + i) for i in range(count)])
        return rows[:, :-1], rows[:, 1:]

    def _row(self, index: int) -> np.ndarray:
        if self._chunks is not None:
            epoch, place = divmod(index, self._chunks)
            index = int(self._order(epoch)[place])
        return self.corpus.read(index * self.seq_len, self.seq_len + 1).astype(np.int64)

    def _draw_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self._chunks)  # type: ignore[arg-type]
