"""HellaSwag: the harness's own evaluator is the oracle of its style, a plain loop that of the other."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import subprocess
import sys
import threading
import urllib.error
from dataclasses import asdict, replace
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import scipy.stats
import tiktoken
import torch
from harness import write_tokenizer
from models import random_weights, to_transformers
from places import REAL, ROOT

from gpt2.config.workload import GPT2Config
from gpt2.device import Cpu
from gpt2.evals import hellaswag
from gpt2.evals.hellaswag import Example, Score, ScoreError, Style, choices, evaluate, load, wilson
from gpt2.evals.log_likelihood import log_probabilities
from gpt2.files.cache import DataError
from gpt2.model.model import GPT2, build
from gpt2.training import distributed

CPU = Cpu()
VOCABULARY = REAL / "tiktoken_cache"
CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=64, n_ctx=64, attention="sdpa")
"""Its context is shorter than some of the texts."""

ODD = [
    (
        "Baking [title] bread",
        "[header] How to bake [title] Heat the oven. [step] Wait.",
        "",
        "[step] Take  it out.",
    ),
    (
        "Removing ice",
        "A woman scrapes ice  off a car [title]",
        "",
        "[title] She drives off. [step] She waves.",
    ),
    (
        "Washing",
        "Someone washes a dog in a tub.",
        "the DOG Barks and",
        "runs; Max's café — “naïve” 🐕 and ½ price",
    ),
    ("Marks", "Nothing but marks follows.", "he", "[step] [title]"),
    ("[all of", "this is one]", "", "mark, and what follows has no context."),
    ("Trailing", "The first has a space after it. ", "", "  Two before it."),
    ("Long", "He walks on and on. " * 20, "then, at last, he", "sits down on a stone."),
    (
        "Edge",
        "She counts: " + "one, two, " * 30,
        "",
        "three, four, five, six, seven, eight, nine and then ten.",
    ),
]
"""Label, context and an ending with what the texts of HellaSwag have, and worse."""

PEOPLE = ["A man", "Two girls", "The chef", "An old lady", "A band", "Someone in a red coat"]
PLACES = ["in a kitchen", "on a frozen lake", "next to a truck", "on stage", "in front of a mirror"]
DEEDS = [
    "pours the batter into a pan",
    "ties the rope around a tree",
    "laughs",
    "takes off and throws the ball at the audience, who catch it and cheer",
    "is holding a rubik's cube",
    "cuts 3 or 4 pieces",
    "walks away from the camera without looking back",
    "continues to brush the horse while talking to someone we cannot see",
]


def examples() -> list[Example]:
    """Forty, in the format of the original: ctx is ctx_a, a space and ctx_b, if there is one."""
    draw = random.Random(5)
    found = []
    for label, ctx_a, ctx_b, ending in ODD:
        endings = [ending, *draw.sample(DEEDS, 3)]
        draw.shuffle(endings)
        found.append((label, ctx_a, ctx_b, endings))
    for _ in range(26):
        ctx_a = f"{draw.choice(PEOPLE)} {draw.choice(DEEDS)} {draw.choice(PLACES)}."
        ctx_b = draw.choice(["", "he", "they", "the other person then"])
        found.append(("Something to do", ctx_a, ctx_b, [f"{deed}." for deed in draw.sample(DEEDS, 4)]))
    for person in PEOPLE:  # who does what is long in bytes and short in characters
        few = f"{draw.choice(['demonstrates', 'describes'])} international responsibilities professionally"
        endings = ["\N{BOX DRAWINGS LIGHT HORIZONTAL}" * 32, few, *draw.sample(DEEDS, 2)]
        found.append(("Letters", f"{person} waits.", "", endings))
    return [
        Example(
            activity_label=label,
            ctx=f"{ctx_a} {ctx_b}" if ctx_b else ctx_a,
            ctx_a=ctx_a,
            ctx_b=ctx_b,
            endings=(endings[0], endings[1], endings[2], endings[3]),
            label=draw.randrange(4),
        )
        for label, ctx_a, ctx_b, endings in found
    ]


EXAMPLES = examples()
FEW = EXAMPLES[:10]
"""For what needs no oracle: the odd ones and some others."""


def write(path: Path, questions: list[Example] = EXAMPLES) -> Path:
    """As the original file has them, with the fields that are not read too."""
    rest = {"ind": 24, "split": "val", "split_type": "indomain", "source_id": "activitynet~v_-JhWjGDPHMY"}
    path.write_text("".join(json.dumps({**asdict(question), **rest}) + "\n" for question in questions))
    return path


@cache
def model() -> GPT2:
    made = build(CONFIG, 1, CPU.torch_device)
    random_weights(made)
    with torch.no_grad():
        made.wte.weight.mul_(3)  # so that no two scores are about the same
    return made


def sums(style: Style, of: GPT2 | None = None, questions: list[Example] = FEW, **options: Any) -> np.ndarray:
    """By example and choice."""
    texts = [(choice.tokens, choice.scored) for each in questions for choice in choices(each, style)]
    how: dict[str, Any] = {"device": CPU, "autocast": contextlib.nullcontext, "batch_size": 8, **options}
    return log_probabilities(of or model(), texts, **how).reshape(-1, 4)


def score(style: Style, of: GPT2 | None = None, questions: list[Example] = FEW, **options: Any) -> Score:
    how: dict[str, Any] = {"device": CPU, "autocast": contextlib.nullcontext, "batch_size": 8, **options}
    return evaluate(of or model(), questions, style=style, **how)


# --- the style of the harness


@cache
def questions() -> tuple[np.ndarray, list[Example]]:
    """Our log-probabilities, and the examples with our own choices for labels, of either kind in turn.

    So a single choice that the harness makes differently changes an accuracy.
    """
    found = sums("harness", questions=EXAMPLES)
    lengths = np.array([[choice.length for choice in choices(example, "harness")] for example in EXAMPLES])
    with np.errstate(divide="ignore"):
        ours = np.stack([found.argmax(1), (found / lengths).argmax(1)])
    return found, [replace(example, label=int(ours[1 - i % 2, i])) for i, example in enumerate(EXAMPLES)]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What lm-evaluation-harness finds for the same examples and weights."""
    if not VOCABULARY.is_dir():
        pytest.skip("tiktoken's GPT-2 vocabulary is not at hand")
    folder = tmp_path_factory.mktemp("harness")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
        write(folder / "examples.jsonl", questions()[1])
    write_tokenizer(folder, VOCABULARY)
    to_transformers(model()).save_pretrained(folder)
    command = [sys.executable, str(ROOT / "tests" / "support" / "harness.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_each_choice_has_the_log_probability_that_the_harness_gives_it(harness: dict[str, Any]) -> None:
    np.testing.assert_allclose(questions()[0], np.array(harness["sums"]), rtol=2e-6, atol=2e-4)


@pytest.mark.slow
def test_both_accuracies_are_those_of_the_harness(harness: dict[str, Any], vocabulary: None) -> None:
    found = score("harness", questions=questions()[1])
    assert (found.acc, found.acc_norm) == (harness["acc"], harness["acc_norm"])
    assert found.examples == 40
    assert found.style == "harness"


@pytest.mark.slow
def test_the_examples_tell_the_ways_to_count_apart(harness: dict[str, Any], vocabulary: None) -> None:
    """What the two tests above rest on."""
    found = np.array(harness["sums"])
    best = np.sort(found)[:, ::-1]
    assert (best[:, 0] - best[:, 1]).min() > 0.01
    assert set(found.argmax(1)) == {0, 1, 2, 3}
    assert 0.5 < harness["acc"] < 1
    assert 0.5 < harness["acc_norm"] < 1
    texts = [choices(example, "harness") for example in EXAMPLES]
    assert max(len(choice.tokens) for each in texts for choice in each) > CONFIG.n_ctx + 1
    characters, tokens = (
        np.array([[getattr(c, of) for c in each] for each in texts]) for of in ("length", "scored")
    )
    raw = np.array([[len(ending.encode()) for ending in example.endings] for example in EXAMPLES])
    with np.errstate(divide="ignore"):
        chosen = [(found / lengths).argmax(1)[::2] for lengths in (characters, tokens, raw, characters + 1)]
    assert all((chosen[0] != other).any() for other in chosen[1:])


# --- the style of llm.c


def plainly(example: Example, ending: str) -> tuple[float, int]:
    """Summed loss and number of an ending's tokens, by the definition."""
    encode = tiktoken.get_encoding("gpt2").encode
    context, scored = encode(example.ctx), encode(" " + ending)
    kept = (context + scored)[-(CONFIG.n_ctx + 1) :]
    logits = model().logits(torch.tensor([kept[:-1]]))[0]
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(kept[1:]), reduction="none")
    return losses[-len(scored) :].sum().item(), len(scored)


@torch.no_grad()
def test_completion_scores_are_those_of_one_text_at_a_time(vocabulary: None) -> None:
    losses = [[plainly(example, ending) for ending in example.endings] for example in FEW]
    expected = np.array([[-loss for loss, _ in each] for each in losses])
    np.testing.assert_allclose(sums("completion"), expected, rtol=2e-6, atol=2e-4)
    right = [min(range(4), key=lambda i: each[i][0]) for each in losses]
    right_norm = [min(range(4), key=lambda i: each[i][0] / each[i][1]) for each in losses]
    labels = [example.label for example in FEW]
    found = score("completion")
    assert found.acc == np.mean(np.equal(right, labels))
    assert found.acc_norm == np.mean(np.equal(right_norm, labels))
    assert found.style == "completion"


def test_the_styles_score_the_same_example_differently(vocabulary: None) -> None:
    assert not np.isclose(sums("completion"), sums("harness")).any()


# --- batches, ranks, devices


@pytest.mark.slow
@pytest.mark.parametrize("style", get_args(Style))
@pytest.mark.parametrize("batch_size", [1, 5, 20])
def test_the_batch_size_changes_no_score(style: Style, batch_size: int, vocabulary: None) -> None:
    assert score(style, batch_size=batch_size) == score(style)


@pytest.mark.slow
def test_every_rank_has_the_score_of_a_single_process_after_as_many_passes(
    vocabulary: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, ranks = score("completion", questions=FEW), range(3)
    told: list[list[Any]] = [[] for _ in ranks]
    passes = [0, 0, 0]
    plain = GPT2.logits

    def on(rank: int, *, others_known: bool) -> Score:
        """One rank's part; its gathers give what each rank told at first, once all have been heard."""
        number = iter(range(9))

        def gather(mine: Any, processes: int) -> list[Any]:
            assert processes == 3
            if others_known:
                call = next(number)
                return [told[each][call] for each in ranks]
            told[rank].append(mine)
            return [mine]

        def logits(self: GPT2, tokens: torch.Tensor) -> torch.Tensor:
            passes[rank] += others_known
            return plain(self, tokens)

        monkeypatch.setattr(distributed, "gather", gather)
        monkeypatch.setattr(GPT2, "logits", logits)
        return score("completion", questions=FEW, rank=rank, processes=3, batch_size=3)

    parts = [on(rank, others_known=False) for rank in ranks]
    assert [part.examples for part in parts] == [4, 3, 3]
    assert len({told[rank][0] for rank in ranks}) > 1  # batches, if each rank went its own way
    assert [on(rank, others_known=True) for rank in ranks] == [whole] * 3
    assert len(set(passes)) == 1


def test_a_rank_without_examples_has_the_score_too(vocabulary: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        distributed, "gather", lambda mine, processes: [mine, 2 if isinstance(mine, int) else [1, 0, 1, 0]]
    )
    assert score("completion", questions=EXAMPLES[:1], rank=1, processes=2) == Score(
        acc=1.0, acc_norm=0.0, examples=1, style="completion"
    )


def test_texts_of_many_lengths_take_few_shapes(vocabulary: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, plain = set(), GPT2.logits

    def logits(self: GPT2, tokens: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(tokens.shape))
        return plain(self, tokens)

    monkeypatch.setattr(GPT2, "logits", logits)
    score("completion")
    assert shapes == {(8, 32), (8, 64)}


def test_padding_rows_of_the_vocabulary_change_no_score(vocabulary: None) -> None:
    padded = build(GPT2Config(**{**asdict(CONFIG), "padded_vocab_size": 50304}), 1, CPU.torch_device)
    plain = dict(model().named_parameters())
    with torch.no_grad():
        for name, parameter in padded.named_parameters():
            parameter[: len(plain[name])] = plain[name]
    found, expected = (sums("completion", each, FEW[:3]) for each in (padded, model()))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-4)


def test_autocast_narrows_the_products_and_not_the_sums(vocabulary: None) -> None:
    narrow, wide = (
        sums("completion", questions=FEW[:3], autocast=how)
        for how in (lambda: torch.autocast("cpu", dtype=torch.bfloat16), contextlib.nullcontext)
    )
    assert not np.equal(narrow, wide).any()
    np.testing.assert_allclose(narrow, wide, rtol=0.02)
    assert not np.equal(narrow, narrow.astype(np.float16)).all()  # a bfloat16 has fewer digits than float16


def test_nothing_is_compiled_for_an_evaluation(vocabulary: None, process_settings: None) -> None:
    compiled = build(CONFIG, 1, CPU.torch_device)
    for block in compiled.h:
        block.compile(backend="eager")
    score("completion", compiled, questions=EXAMPLES[:2])
    assert CPU.compilations() == 0
    compiled.logits(torch.zeros(1, 8, dtype=torch.int64))  # they are meant for it
    assert CPU.compilations() > 0


def test_no_gradient_is_kept(vocabulary: None) -> None:
    score("completion", questions=EXAMPLES[:2])
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model().parameters())


def test_progress_counts_endings_up_to_all(vocabulary: None) -> None:
    seen: list[tuple[int, int]] = []
    score("harness", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (40, 40)
    assert len(seen) >= 5


def test_a_model_that_gives_nan_is_refused(vocabulary: None) -> None:
    broken = build(CONFIG, 1, CPU.torch_device)
    with torch.no_grad():
        broken.ln_f.weight.fill_(float("nan"))
    with pytest.raises(ScoreError, match=r"gives NaN for 2 of 2 examples; its weights are not finite"):
        score("completion", broken, questions=EXAMPLES[:2])


def test_an_ending_longer_than_the_model_s_context_is_refused(vocabulary: None) -> None:
    long = Example(**{**asdict(EXAMPLES[0]), "endings": ("no " * 70, "a", "b", "c")})
    with pytest.raises(DataError, match=r"71 tokens to be scored do not fit the model's context of 64"):
        score("completion", questions=[long])


# --- figures


@pytest.mark.parametrize(("right", "count"), [(0, 40), (13, 40), (40, 40), (2955, 10042)])
def test_intervals_are_wilson_s(right: int, count: int) -> None:
    expected = scipy.stats.binomtest(right, count).proportion_ci(0.95, "wilson")
    assert wilson(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-7)
    found = Score(acc=right / count, acc_norm=0.5, examples=count, style="harness")
    assert found.acc_norm_interval == wilson(0.5, count)


# --- files


def test_a_file_of_the_original_format_is_read(tmp_path: Path) -> None:
    assert load(write(tmp_path / "mine.jsonl")) == EXAMPLES


def test_a_byte_order_mark_at_the_beginning_is_ignored(tmp_path: Path) -> None:
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + write(tmp_path / "mine.jsonl").read_bytes())
    assert load(marked) == EXAMPLES


@pytest.mark.parametrize("place", ["data dir", "cache"])
def test_the_known_file_is_found_without_a_path(
    place: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path if place == "data dir" else own_cache / "corpora"
    folder.mkdir(exist_ok=True)
    write(folder / "hellaswag_val.jsonl", EXAMPLES[:3])
    monkeypatch.setenv("GPT2_DATA_DIR", str(tmp_path))
    assert load() == EXAMPLES[:3]


def serve(content: bytes, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for the network; the addresses that were asked for."""
    wanted: list[str] = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        wanted.append(url)
        return io.BytesIO(content)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return wanted


def test_it_is_downloaded_once(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write(tmp_path / "there.jsonl").read_bytes()
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(content).hexdigest())
    wanted = serve(content, monkeypatch)
    assert load() == load() == EXAMPLES
    assert wanted == ["https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"]


def test_a_download_that_is_not_the_known_file_is_not_kept(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(write(tmp_path / "there.jsonl").read_bytes()[:-100], monkeypatch)
    with pytest.raises(DataError, match=r"does not give the known file; put hellaswag_val.jsonl into"):
        load()
    assert not list(own_cache.rglob("hellaswag*"))


def test_a_download_that_breaks_off_is_one_line_with_the_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    class BreaksOff(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), BreaksOff) as server:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(hellaswag, "URL", f"http://127.0.0.1:{server.server_port}/hellaswag_val.jsonl")
        with pytest.raises(
            DataError, match=r"could not be downloaded .*more expected.*; put hellaswag_val.jsonl into"
        ):
            load()


def test_without_a_network_the_error_names_the_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(url: str, timeout: float) -> io.BytesIO:
        raise urllib.error.URLError("Network is unreachable")

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    said = r"\(Network is unreachable\); put hellaswag_val.jsonl into \$GPT2_DATA_DIR.*, or give its"
    with pytest.raises(DataError, match=said):
        load()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"label": 4}, "label: Input should be less than 4"),
        ({"label": True}, "label: Value error, should be a number from 0 to 3"),
        ({"endings": ["a", "b", "c"]}, "endings.3: Field required"),
        ({"ctx": ""}, "ctx: String should have at least 1 character"),
        ({"ctx_b": None}, "ctx_b: Input should be a valid string"),
    ],
)
def test_a_line_that_is_no_example_is_named(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", EXAMPLES[:1])
    path.write_text(path.read_text() + json.dumps({**asdict(EXAMPLES[1]), **change}) + "\n")
    with pytest.raises(DataError, match=rf"mine\.jsonl:2: {complaint}; each line should be one example"):
        load(path)


@pytest.mark.parametrize("content", [b'{"ctx": ', b'{"ctx": "\xff"}', b"ctx\n"])
def test_a_line_that_is_no_json_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"mine\.jsonl:1: Invalid JSON"):
        load(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match=r"mine\.jsonl holds no examples"):
        load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.jsonl \(No such file or directory\)"):
        load(tmp_path / "nowhere.jsonl")
