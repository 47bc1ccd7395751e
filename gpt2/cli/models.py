"""Commands for existing models: `gpt2 eval`, `sample`, `import` and `export`."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from gpt2.config.devices import DeviceName
from gpt2.config.workload import TEXT_VOCABULARY
from gpt2.errors import GPT2Error
from gpt2.terminal import fail

if TYPE_CHECKING:
    from gpt2.config.workload import GPT2Config
    from gpt2.device import Device
    from gpt2.evals.hellaswag import Style
    from gpt2.evals.validation_loss import Autocast
    from gpt2.model.model import GPT2
    from gpt2.pretrain.checkpoint import Saved

Model = Annotated[
    Path, Argument(help="A run's folder, a checkpoint, or weights of transformers, nanoGPT or llm.c.")
]
OnDevice = Annotated[DeviceName, Option(help="Where the model runs.")]
Products = Annotated[Literal["float32", "bfloat16"], Option(help="Number format of its matrix products.")]


def evaluate(
    model: Model,
    val_corpus: Annotated[
        str | None,
        Option(help="Validation loss on this corpus: a prepared one, or a folder of shards."),
    ] = None,
    val_tokens: Annotated[int, Option(min=1, help="From its beginning.")] = 1_048_576,
    hellaswag: Annotated[bool, Option("--hellaswag", help="Score HellaSwag's validation examples.")] = False,
    hellaswag_file: Annotated[Path | None, Option(help="Where they lie, if not downloaded.")] = None,
    style: Annotated[
        Literal["completion", "harness", "both"],
        Option(help="As llm.c scores it, or as lm-evaluation-harness does; these do not compare."),
    ] = "both",
    limit: Annotated[int | None, Option(min=1, help="Only the first examples.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Sequences at once.")] = 8,
    device: OnDevice = "cpu",
    autocast: Products = "float32",
) -> None:
    """Judge a MODEL: validation loss on a corpus, and HellaSwag's acc and acc_norm.

    Example: gpt2 eval runs/mine --val-corpus fineweb-edu --hellaswag --device cuda --autocast bfloat16
    """
    if val_corpus is None and not (hellaswag or hellaswag_file):
        fail("nothing to judge by: say --val-corpus CORPUS, --hellaswag, or both")
    from gpt2.data.shards import Shards
    from gpt2.evals import hellaswag as task
    from gpt2.evals.validation_loss import corpus_loss
    from gpt2.files.listing import listed
    from gpt2.pretrain.datasets import validation_shards

    try:
        saved, plain, chip, casts = _open(model, device, autocast)
        config = plain.config
        how: dict[str, Any] = {"device": chip, "autocast": casts, "batch_size": batch_size}
        learnt = ""
        if saved and saved.data:
            learnt = f"; trained on {saved.tokens:,} tokens of {saved.data['name']}"
            learnt += f", from the weights of {saved.begun_from}" if saved.begun_from else ""
        if hellaswag or hellaswag_file:
            _reads_text(model, saved, config)
        if val_corpus is not None:
            trained = saved.run["workload"] if saved and saved.run else {"seed": 0, "seq_len": config.n_ctx}
            seq_len = trained["seq_len"]  # the model has not learnt the places beyond it
            corpus = validation_shards(val_corpus, config.vocab_size, trained["seed"])
            if saved and saved.data.get("sha256") == corpus.sha256:
                typer.echo(f"gpt2: {val_corpus} holds the very tokens that {model} was trained on", err=True)
            if isinstance(corpus, Shards) and corpus.is_text and (other := _other_vocabulary(model, saved)):
                own = "give a folder of its own tokens"
                fail(f"{model} {other}, and {val_corpus} holds GPT-2's tokens; {own}")
            loss, tokens = corpus_loss(
                plain, corpus, tokens=val_tokens, seq_len=seq_len, progress=_progress("sequences"), **how
            )
            names = [path.name for path in corpus.files] if isinstance(corpus, Shards) else []
            files = f" ({listed(names)})" if names else ""
            of = f"{tokens:,} tokens of {val_corpus} in sequences of {seq_len:,}"
            typer.echo(f"validation loss {loss:.4f} on {of}{files}{learnt}")
        if hellaswag or hellaswag_file:
            examples = task.load(hellaswag_file)[:limit]
            styles: tuple[Style, ...] = ("completion", "harness") if style == "both" else (style,)
            for each in styles:
                score = task.evaluate(plain, examples, style=each, progress=_progress("endings"), **how)
                low, high = score.acc_norm_interval
                typer.echo(
                    f"HellaSwag ({each}) acc {score.acc:.4f}, acc_norm {score.acc_norm:.4f} "
                    f"({low:.4f} to {high:.4f}, 95 %) of {score.examples:,} examples{learnt}"
                )
    except GPT2Error as error:
        fail(error)


def sample(
    model: Model,
    prompt: Annotated[list[str] | None, Option(help="What to continue; may be given several times.")] = None,
    max_tokens: Annotated[int, Option(min=1, help="Tokens to write.")] = 100,
    temperature: Annotated[float, Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, Option(min=1, help="Choose among so many tokens.")] = 200,
    top_p: Annotated[float | None, Option(help="Choose among the likeliest of this share together.")] = None,
    seed: Annotated[int, Option(min=0, help="The same seed writes the same text.")] = 1337,
    device: OnDevice = "cpu",
    autocast: Products = "float32",
) -> None:
    """Let a MODEL go on with a prompt, or with each of several; the text comes as it is written.

    Example: gpt2 sample runs/mine --prompt "Romeo and Juliet"
    """
    import torch

    from gpt2.evals.generate import generate, stream_text
    from gpt2.pretrain.config import PROMPTS
    from gpt2.text import encoded

    try:
        saved, plain, _, casts = _open(model, device, autocast)
        config = plain.config
        _reads_text(model, saved, config)
        for each in prompt or PROMPTS:
            if not each:
                typer.echo("gpt2: the prompt is empty; the text begins from <|endoftext|>", err=True)
            tokens = encoded(each)
            if (over := len(tokens) - config.n_ctx) > 0:
                unread = f"the first {over:,} tokens of the prompt"
                typer.echo(f"gpt2: the model reads {config.n_ctx:,} tokens, not {unread}", err=True)
            found = generate(
                plain,
                torch.tensor([tokens]),
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                autocast=casts,
            )
            sys.stdout.write(each)
            for text in stream_text(int(token) for token in found):
                sys.stdout.write(text)
                sys.stdout.flush()
            sys.stdout.write("\n\n")
    except (GPT2Error, ValueError) as error:
        fail(error)


def import_(
    source: Annotated[
        Path, Argument(help="A folder or file of transformers, nanoGPT's ckpt.pt, llm.c's .bin.")
    ],
    folder: Annotated[Path, Argument(help="Where the checkpoint is to be.")],
) -> None:
    """Make a checkpoint of weights that others saved: to train on from, to judge, or to sample from.

    Example: gpt2 import gpt2_124M.bin weights/openai
    """
    from gpt2.data.tokenizer_files import other_vocabulary
    from gpt2.files.listing import name_problem
    from gpt2.interop import convert
    from gpt2.pretrain import checkpoint_tensors

    try:
        if problem := name_problem(folder):
            fail(problem)
        if folder.exists():
            fail(f"{folder} is there already; choose another folder")
        with _said():
            config, weights = convert.read(source)
        tokenizer = other_vocabulary(_folder(source))
        checkpoint_tensors.save_weights(folder, config, weights, other_vocabulary=tokenizer is not None)
        if tokenizer:
            other = f"{tokenizer} is not GPT-2's vocabulary, and a checkpoint knows no other"
            typer.echo(f"gpt2: {other}", err=True)
    except GPT2Error as error:
        fail(error)
    typer.echo(f"{config.parameters:,} parameters in {folder}: gpt2 train CONFIG --init-from {folder}")


def export(
    model: Model,
    target: Annotated[Path, Argument(help="A folder for transformers, a file for the others.")],
    format: Annotated[
        Literal["transformers", "nanogpt", "llmc", "llmc-bfloat16"], Option(help="Who is to read it.")
    ] = "transformers",
) -> None:
    """Write a MODEL as others read it: a folder for transformers, nanoGPT's ckpt.pt, or llm.c's .bin.

    Example: gpt2 export runs/mine exported
    """
    from gpt2.files.listing import name_problem
    from gpt2.interop import convert

    try:
        if problem := name_problem(target):
            fail(problem)
        if target.exists():
            fail(f"{target} is there already; choose another name")
        saved, config, weights = _load(model)
        with _said():
            if format == "transformers":
                other = _other_vocabulary(model, saved) is not None
                convert.write_huggingface(target, config, weights, other_vocabulary=other)
            elif format == "nanogpt":
                convert.write_nanogpt(target, config, weights)
            else:
                convert.write_llmc(target, config, weights, bfloat16=format == "llmc-bfloat16")
    except GPT2Error as error:
        fail(error)
    typer.echo(f"{config.parameters:,} parameters in {target}")


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Print the warnings of a conversion, one line each."""
    from gpt2.interop.convert import ConvertWarning

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ConvertWarning)
        yield
    for each in found:
        if issubclass(each.category, ConvertWarning):
            typer.echo(f"gpt2: {each.message}", err=True)


def _load(path: Path) -> tuple[Saved | None, GPT2Config, dict[str, Any]]:
    """Load a run's newest checkpoint, a checkpoint, or another project's weights, which have no facts."""
    from gpt2.interop import convert
    from gpt2.pretrain import checkpoint_tensors
    from gpt2.pretrain.checkpoint import FACTS, newest, read

    kept = newest(path)  # asked once: a run that goes on may write another meanwhile
    with _said():
        if (kept / FACTS).exists():
            return read(kept), *checkpoint_tensors.weights(kept)
        return None, *convert.read(path)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _reads_text(path: Path, saved: Saved | None, config: GPT2Config) -> None:
    """Exit where the model's vocabulary is not the one that text is encoded with."""
    what = _other_vocabulary(path, saved)
    if config.vocab_size < TEXT_VOCABULARY:
        what = (
            f"has a vocabulary of {config.vocab_size}, not GPT-2's {TEXT_VOCABULARY} (nanoGPT's characters, "
            "say, with a meta.pkl beside their data, or generated tokens)"
        )
    if what:
        fail(
            f"{path} {what}: text cannot be encoded for it; judge it on a folder of its own tokens (gpt2 "
            "eval --val-corpus FOLDER), or convert it (gpt2 export)"
        )


def _other_vocabulary(path: Path, saved: Saved | None) -> str | None:
    """Return how it is known that a model learnt another vocabulary than GPT-2's; None where it is not."""
    from gpt2.data.tokenizer_files import other_vocabulary

    if saved:
        return "was imported with a vocabulary that is not GPT-2's" if saved.other_vocabulary else None
    tokenizer = other_vocabulary(_folder(path))
    return f"has a vocabulary that is not GPT-2's: see {tokenizer}" if tokenizer else None


def _open(
    path: Path, device: DeviceName, autocast: Literal["float32", "bfloat16"]
) -> tuple[Saved | None, GPT2, Device, Autocast]:
    from gpt2.config.toggles import Toggles
    from gpt2.device import find
    from gpt2.model.model import build
    from gpt2.pretrain import checkpoint_tensors
    from gpt2.training import stages

    toggles = Toggles(device=device, autocast=autocast, attention="sdpa")
    chip = find(toggles)
    stages.configure_process(toggles, chip)
    saved, config, weights = _load(path)
    model = build(stages.model_config(toggles, config), None, chip.torch_device)
    checkpoint_tensors.load_weights(model, weights)
    return saved, model, chip, stages.precision(toggles, chip)[0]


def _progress(what: str) -> Any:
    """Return a function that shows progress on a terminal; None where stderr is not one."""
    if not sys.stderr.isatty():
        return None

    def told(done: int, all_of_them: int) -> None:
        end = "\n" if done == all_of_them else ""
        print(f"\r{done:,} of {all_of_them:,} {what}", end=end, file=sys.stderr, flush=True)

    return told
