"""Train GPT-2 with Hugging Face's Trainer on random tokens, for the external rungs of peers-*.yaml.

python transformers_trainer.py --model gpt2 --batch 1 --seq-len 1024 --bf16 --compile

Prints `step N: loss X` for each step, or each --log-every steps. Downloads nothing: the weights are new.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

SIZES = {
    "tiny": {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 512, "n_positions": 128},
    "gpt2": {},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}
DIFFERENT = 1024  # sequences, 8 MiB of them with 1,024 tokens each
CANNOT_RUN = 69  # by which bench knows that the library is missing, and nothing has failed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, default="gpt2")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100_000, help="bench ends it when it has seen enough")
    parser.add_argument("--log-every", type=int, default=1, help="each log waits for the device")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--attention", default="sdpa", help="eager, sdpa or flash_attention_2")
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "WANDB_DISABLED": "true"}
    try:
        import accelerate
        import transformers
    except ImportError as error:
        print(f"{error.name} is not installed; pip install transformers accelerate", flush=True)
        sys.exit(CANNOT_RUN)
    import torch

    versions = f"transformers {transformers.__version__}, accelerate {accelerate.__version__}"
    print(f"version {versions}, torch {torch.__version__}", flush=True)
    made = trainer(arguments)
    # Which with several GPUs in sight is more than was asked for.
    print(f"tokens per step {made.args.train_batch_size * arguments.seq_len}", flush=True)
    made.train()


def trainer(arguments: argparse.Namespace):
    """A Trainer that reads nothing and keeps no checkpoint."""
    import torch
    import transformers

    class Random(torch.utils.data.Dataset):
        """Uniform over the vocabulary; the same at each start, and drawn before: no step waits for it."""

        def __init__(self, vocab_size: int) -> None:
            shape = DIFFERENT, arguments.seq_len
            self.tokens = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1337))

        def __len__(self) -> int:
            return arguments.steps * arguments.batch

        def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
            tokens = self.tokens[place % DIFFERENT]
            return {"input_ids": tokens, "labels": tokens}

    class Steps(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others) -> None:
            if logs and "loss" in logs:
                print(f"step {state.global_step}: loss {float(logs['loss']):.4f}", flush=True)

    torch.manual_seed(1337)
    # No dropout, and nothing kept for generation: what all trainers of the ladder compute.
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    no_marks = {"bos_token_id": None, "eos_token_id": None}  # of which random tokens know nothing
    config = transformers.GPT2Config(**SIZES[arguments.model], **plain, **no_marks)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=arguments.attention)
    settings = transformers.TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "transformers-trainer"),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        learning_rate=6e-4,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=arguments.bf16,
        torch_compile=arguments.compile,
        use_cpu=arguments.cpu,
        logging_steps=arguments.log_every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1337,
    )
    data = Random(config.vocab_size)
    made = transformers.Trainer(model=model, args=settings, train_dataset=data, callbacks=[Steps()])
    made.remove_callback(transformers.PrinterCallback)
    return made


if __name__ == "__main__":
    main()
