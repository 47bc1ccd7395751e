"""EleutherAI's lm-evaluation-harness on a local HellaSwag, without a network.

python tests/support/harness.py FOLDER      # with a model as transformers saves it and examples.jsonl; writes
found.json

The task is the harness's own but for the place of its examples. In a process of its own, because the harness
seeds all generators, and what keeps it off the network is read when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

TASK = """
include: {hellaswag}
task: local
dataset_path: json
dataset_kwargs: {{data_files: {{train: {examples}, validation: {examples}}}}}
"""


def write_tokenizer(folder: Path, cache: Path) -> None:
    """GPT-2's tokenizer for transformers, from the two files of tiktoken's cache under other names."""
    published = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for name, renamed in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        kept = hashlib.sha1(f"{published}{name}".encode()).hexdigest()
        (folder / renamed).write_bytes((cache / kept).read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def ask(folder: Path) -> dict[str, Any]:
    """The two accuracies, and by example the log-probability of each choice."""
    import lm_eval
    from lm_eval.models import huggingface
    from lm_eval.tasks import TaskManager

    model: Any = huggingface.HFLM  # its decorator hides what it takes, and so does that of
    evaluate: Any = lm_eval.simple_evaluate

    theirs = Path(lm_eval.__file__).parent / "tasks" / "hellaswag" / "hellaswag.yaml"
    task = folder / "tasks" / "local.yaml"
    task.parent.mkdir()
    task.write_text(TASK.format(hellaswag=theirs, examples=folder / "examples.jsonl"))
    found = evaluate(
        model=model(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4),
        tasks=["local"],
        task_manager=TaskManager(include_defaults=False, include_path=str(task.parent)),
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["local"], key=lambda sample: sample["doc_id"])
    return {
        "acc": found["results"]["local"]["acc,none"],
        "acc_norm": found["results"]["local"]["acc_norm,none"],
        "sums": [[sum_ for sum_, _ in sample["filtered_resps"]] for sample in samples],
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(place / "huggingface")}
    (place / "found.json").write_text(json.dumps(ask(place)))
