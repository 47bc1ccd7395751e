"""Train GPT-2 in plain JAX on random tokens, for external rungs: one jitted step, AdamW by hand.

python jax_gpt2.py --model gpt2 --batch 1 --seq-len 1024 --bf16

Prints `step N: loss X` for each step, or each --log-every steps, and on a GPU `peak bytes N` whenever the
most that XLA's allocator has had in use has grown. JAX takes the accelerator that it finds, or the CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial

SIZES = {  # layers, heads, width, vocabulary
    "tiny": (2, 2, 64, 512),
    "gpt2": (12, 12, 768, 50257),
    "gpt2-medium": (24, 16, 1024, 50257),
    "gpt2-large": (36, 20, 1280, 50257),
    "gpt2-xl": (48, 25, 1600, 50257),
}
CANNOT_RUN = 69  # by which bench knows that the library is missing, and nothing has failed
LR, BETA1, BETA2, EPS, DECAY, CLIP = 6e-4, 0.9, 0.95, 1e-8, 0.1, 1.0

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    print(
        f"{error.name} is not installed here; pip install jax, for a GPU: pip install 'jax[cuda12]'",
        flush=True,
    )
    sys.exit(CANNOT_RUN)


def weights(key, layers: int, d: int, vocabulary: int, context: int) -> dict:
    """float32, as GPT-2 begins: normal with deviation 0.02, projections into the residual stream smaller."""
    keys = iter(jax.random.split(key, 2 + 4 * layers))

    def normal(*shape: int, deviation: float = 0.02):
        return deviation * jax.random.normal(next(keys), shape)

    def norm() -> dict:
        return {"g": jnp.ones(d), "b": jnp.zeros(d)}

    def linear(n_in: int, n_out: int, deviation: float = 0.02) -> dict:
        return {"w": normal(n_in, n_out, deviation=deviation), "b": jnp.zeros(n_out)}

    small = 0.02 / math.sqrt(2 * layers)
    return {
        "wte": normal(vocabulary, d),
        "wpe": normal(context, d),
        "ln_f": norm(),
        "h": [
            {
                "ln_1": norm(),
                "qkv": linear(d, 3 * d),
                "proj": linear(d, d, small),
                "ln_2": norm(),
                "up": linear(d, 4 * d),
                "down": linear(4 * d, d, small),
            }
            for _ in range(layers)
        ],
    }


def normalised(x, p):
    """LayerNorm, in float32."""
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return x * p["g"] + p["b"]


def loss_of(params: dict, tokens, targets, heads: int, dtype):
    """Mean cross-entropy, float32. tokens, targets: (B, T)."""

    def linear(x, p):
        return x.astype(dtype) @ p["w"].astype(dtype) + p["b"].astype(dtype)

    B, T = tokens.shape
    # By default XLA would hold all scores on a GPU. cuDNN does not, and takes 16 bits only.
    fused = "cudnn" if jax.default_backend() == "gpu" and dtype == jnp.bfloat16 else None
    x = params["wte"][tokens] + params["wpe"][:T]
    for p in params["h"]:
        q, k, v = (
            each.reshape(B, T, heads, -1)
            for each in jnp.split(linear(normalised(x, p["ln_1"]), p["qkv"]), 3, -1)
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=fused).reshape(B, T, -1)
        x = x + linear(y, p["proj"]).astype(jnp.float32)
        y = jax.nn.gelu(linear(normalised(x, p["ln_2"]), p["up"]), approximate=True)
        x = x + linear(y, p["down"]).astype(jnp.float32)
    logits = (normalised(x, params["ln_f"]).astype(dtype) @ params["wte"].astype(dtype).T).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


@partial(jax.jit, static_argnames=("heads", "dtype"), donate_argnums=(0, 1))
def step(params: dict, state: tuple, count, tokens, targets, heads: int, dtype):
    """One of AdamW, gradients clipped at norm 1; weight decay on matrices and embeddings only."""
    loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets, heads, dtype)
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / (norm + 1e-6)), grads)
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state[0], grads)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, state[1], grads)

    def updated(p, m, v):
        update = (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPS)
        return p - LR * (update + (DECAY * p if p.ndim > 1 else 0.0))

    return jax.tree.map(updated, params, first, second), (first, second), loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, default="gpt2")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100_000, help="bench ends it when it has seen enough")
    parser.add_argument("--log-every", type=int, default=1, help="each log waits for the device")
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16, all else in float32")
    arguments = parser.parse_args()
    layers, heads, d, vocabulary = SIZES[arguments.model]
    print(f"version jax {jax.__version__} on {jax.devices()[0].device_kind}", flush=True)
    print(f"tokens per step {arguments.batch * arguments.seq_len}", flush=True)
    params = weights(jax.random.key(1337), layers, d, vocabulary, arguments.seq_len)
    state = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    dtype = jnp.bfloat16 if arguments.bf16 else jnp.float32
    most = 0
    for number in range(1, arguments.steps + 1):
        drawn = jax.random.randint(
            jax.random.key(number), (arguments.batch, arguments.seq_len + 1), 0, vocabulary
        )
        count = jnp.float32(number)
        params, state, loss = step(params, state, count, drawn[:, :-1], drawn[:, 1:], heads, dtype)
        if number % arguments.log_every == 0:
            print(f"step {number}: loss {float(loss):.4f}", flush=True)
            counted = jax.local_devices()[0].memory_stats() or {}  # none of a CPU
            if (peak := counted.get("peak_bytes_in_use", 0)) > most:
                most = peak
                print(f"peak bytes {peak}", flush=True)


if __name__ == "__main__":
    main()
