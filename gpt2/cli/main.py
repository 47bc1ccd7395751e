"""The command gpt2 for long runs: `gpt2 prepare`, `train`, `eval`, `sample`, `import` and `export`."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from gpt2.cli.models import evaluate, export, import_, sample
from gpt2.terminal import Version, fail, finite, paragraphs, surroundings, use_streams

MODULE = "gpt2.cli"

app = typer.Typer(
    name="gpt2",
    help="Train GPT-2 from its corpus to its evaluation, with the toggles that bench found to pay.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Begin with: gpt2 prepare tinyshakespeare, then gpt2 train mini-shakespeare",
)

Overrides = Annotated[
    list[str] | None,
    Option("--set", metavar="PATH=VALUE", help="Override a key, such as toggles.device=cuda or steps=100."),
]


@app.callback()
def options(version: Version = False) -> None:
    return


def train(
    config: Annotated[str, Argument(help="A YAML file, or a configuration's name, such as tiny.")],
    out: Annotated[Path | None, Option(help="The run's folder; default: runs/NAME.")] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on from the newest checkpoint in the folder.")
    ] = False,
    init_from: Annotated[Path | None, Option(help="A run or checkpoint whose weights to begin with.")] = None,
    data: Annotated[
        Path | None, Option(help="Where the corpus lies, if gpt2 prepare put it elsewhere.")
    ] = None,
    stream: Annotated[bool, Option("--stream", help="Read the corpus as it comes, without shards.")] = False,
    text_column: Annotated[str | None, Option(help="Of a stream's text, where it cannot be told.")] = None,
    val_corpus: Annotated[
        str | None,
        Option(help="Validate on this corpus instead: a prepared one, or as gpt2 prepare takes it."),
    ] = None,
    max_hours: Annotated[
        float | None,
        Option(
            min=0.001, callback=finite, help="End in order, with a checkpoint, before so many hours are over."
        ),
    ] = None,
    peak_tflops: Annotated[
        float | None, Option(min=0.001, callback=finite, help="Dense bfloat16 peak of one device.")
    ] = None,
    tensorboard: Annotated[bool, Option("--tensorboard", help="Also write RUN/tensorboard.")] = False,
    wandb: Annotated[bool, Option("--wandb", help="Also log to Weights & Biases.")] = False,
    set_: Overrides = None,
) -> None:
    """Train by a CONFIG, from the start or from where an earlier leg of the run came to.

    Several devices are trained on by as many processes, which this command starts. Ctrl-C ends the run after
    the step under way, with a checkpoint. Exit code: 0 at the end, or where --max-hours are over; 2 wrong
    configuration, data or checkpoint, or a disk that takes no checkpoint; 6 the run was stopped by its guard,
    or failed; 130 interrupted.

    Example: gpt2 train tiny --out runs/first
    """
    from gpt2.config.validation import ConfigError
    from gpt2.pretrain.config import load
    from gpt2.pretrain.launcher import launch_ranks, started
    from gpt2.training.reexec import check_rank_variables, enter_environment, tell_unheeded_threads
    from gpt2.training.stages import environment

    try:
        check_rank_variables()
        run = load(config, set_ or (), val_corpus=val_corpus or None)
    except ConfigError as error:
        fail(error)
    if run.toggles.processes > 1 and not started():
        tell_unheeded_threads(run.toggles, MODULE)
        raise typer.Exit(launch_ranks(MODULE, run.toggles.processes, environment(run.toggles)))
    enter_environment(run.toggles, MODULE)
    from gpt2.pretrain.checkpoint import newest
    from gpt2.pretrain.datasets import Source
    from gpt2.pretrain.rank_main import run_rank
    from gpt2.pretrain.session import SessionOptions

    place = SessionOptions(
        folder=out or Path("runs") / run.name,
        resume=resume,
        begin_from=newest(init_from) if init_from else None,
        source=Source(path=data, stream=stream, text_column=text_column),
        seconds=max_hours * 3600 if max_hours else None,
        peak_flops=peak_tflops * 1e12 if peak_tflops else None,
    )
    raise typer.Exit(run_rank(run, place, tensorboard=tensorboard, wandb=wandb))


def prepare(
    corpus: Annotated[
        str,
        Argument(help="fineweb-edu, fineweb, openwebtext, tinystories, tinyshakespeare, a file, a folder."),
    ],
    out: Annotated[
        Path | None, Option(help="Folder for the shards; default: where gpt2 train looks.")
    ] = None,
    text_column: Annotated[str | None, Option(help="The column of text, where it cannot be told.")] = None,
    val_corpus: Annotated[str | None, Option(help="Take validation from this corpus instead.")] = None,
    val_tokens: Annotated[int | None, Option(min=1, help="Tokens of validation; default: a shard.")] = None,
    shard_tokens: Annotated[int, Option(min=1, help="Tokens of a shard.")] = 100_000_000,
    max_tokens: Annotated[int | None, Option(min=1, help="Stop after so many tokens.")] = None,
    revision: Annotated[str | None, Option(help="Of a repository of the hub; default: its newest.")] = None,
    processes: Annotated[int | None, Option(min=1, help="That tokenise; default: one per processor.")] = None,
    nanogpt: Annotated[Path | None, Option(help="Also write nanoGPT's train.bin and val.bin here.")] = None,
) -> None:
    """Tokenise a CORPUS into shards of uint16, in llm.c's format, for training and validation.

    Broken off, the same command goes on after the last whole shard. Exit code: 0 once all is there; 2 where
    the corpus or the folder cannot be used; 130 interrupted.

    Example: gpt2 prepare tinyshakespeare
    """
    from gpt2.data.batches import DataError
    from gpt2.data.corpora.prepare import prepare
    from gpt2.data.corpora.sources import HUB, shadowed_path, stem_of
    from gpt2.data.index import assert_free_for_nanogpt, read_index, to_nanogpt
    from gpt2.pretrain.datasets import prepared_folder
    from gpt2.pretrain.display import preparing

    place = Path(os.path.expanduser(corpus))
    name = corpus if HUB.fullmatch(corpus) and not place.exists() else stem_of(place)

    def say(line: str) -> None:
        typer.echo(f"gpt2: {line}", err=True)

    settings = {"text_column": text_column, "revision": revision, "val_corpus": val_corpus}
    settings |= {"val_tokens": val_tokens, "shard_tokens": shard_tokens, "max_tokens": max_tokens}
    try:
        if other := shadowed_path(corpus):
            say(f"{corpus} is the known corpus; for the one here, write ./{other}")
        folder = out or prepared_folder(name)
        if nanogpt and not ((before := read_index(folder)) and before.finished):
            assert_free_for_nanogpt(nanogpt)
        preparing(prepare(corpus, folder, processes=processes, warn=say, tell=say, **settings))
        if nanogpt:
            to_nanogpt(folder, nanogpt)
    except DataError as error:
        fail(error)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on after the last whole shard", 130)
    index = read_index(folder)
    assert index
    train = [each["tokens"] for each in index.shards if each["split"] == "train"]
    typer.echo(
        f"{index.documents:,} documents: {sum(train):,} tokens in {len(train):,} shard(s) to train on, "
        f"{index.tokens - sum(train):,} for validation"
    )
    typer.echo(f"{folder} is ready: gpt2 train CONFIG --data {shlex.quote(str(folder))}")


COMMANDS = {"prepare": prepare, "train": train, "eval": evaluate, "sample": sample}
COMMANDS |= {"import": import_, "export": export}
for name, command in COMMANDS.items():
    app.command(name, help=paragraphs(command.__doc__ or ""))(command)


def main() -> None:
    use_streams()
    code = 0
    try:
        with surroundings("gpt2"):
            app(prog_name="gpt2")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    if _threads_left():
        with contextlib.suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _threads_left() -> bool:
    """Return whether libraries left threads that can abort this process while the interpreter exits.

    pyarrow's may only just have started; those of a process group are joined nowhere once a rank has failed.
    """
    ranks = sys.modules.get("torch.distributed")
    return "pyarrow" in sys.modules or bool(ranks and ranks.is_available() and ranks.is_initialized())
