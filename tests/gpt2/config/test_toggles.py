import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from gpt2.config.toggles import Toggles, UnsupportedToggle, resolve
from gpt2.config.tolerances import LOSS_TOLERANCE
from gpt2.config.workload import PRESETS, Workload
from gpt2.device import Cpu, check, find
from gpt2.hardware.host import usable_cores
from gpt2.model.model import build
from gpt2.training.stages import (
    compile_options,
    configure_process,
    environment,
    make_optimizer,
    model_config,
    wrap_model,
)

CASTS = {"autocast": "bfloat16", "adamw": "compiled", "clip": "in_step", "tied_gradient": "rows"}
CASTS |= {"weight_casts": "optimizer"}
GRAPH = {"device": "cuda", "launch": "graph", "adamw": "fused"}


def test_every_toggle_says_what_it_does() -> None:
    for toggle in fields(Toggles):
        assert toggle.metadata["help"].endswith("."), toggle.name


@pytest.mark.parametrize("name", ["micro_batch_size", "grad_accum_steps", "world_size", "threads"])
def test_counts_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} 0 is less than 1"):
        replace(Toggles(), **{name: 0})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "tpu"}, "device: tpu: is not one of cpu, cuda, mps, xpu, xla; choose one of them"),
        ({"device": "xla", "compile": "default"}, "XLA compiles every step by itself; choose eager"),
        ({"device": "xla", "adamw": "fused"}, "choose for_loop"),
        ({"device": "xla", "recompute": "gelu"}, "choose none"),
        ({"device": "xla", "autocast": "float16"}, "choose bfloat16"),
        (
            {"matmul_precision": "high"},
            "matmul_precision: high: TF32 exists on CUDA only; on a CPU choose medium",
        ),
        ({"device": "cuda", "matmul_precision": "medium"}, "on CUDA choose high"),
        ({"attention": "cudnn"}, "attention: cudnn: cuDNN exists on CUDA only; choose sdpa"),
        ({"attention": "efficient"}, "choose sdpa"),
        ({"cross_entropy": "liger"}, "cross_entropy: liger: it is a kernel for GPUs; choose closed_form"),
        ({"layer_norm": "quack"}, "layer_norm: quack: it is a kernel for GPUs; choose torch"),
        ({"attention": "flash4"}, "FlashAttention-4 is for Hopper GPUs and later; choose sdpa"),
        ({"int8": "rowwise"}, "torchao's kernel is for GPUs; choose none"),
        ({"cross_entropy": "triton"}, "cross_entropy: triton: it is a kernel for GPUs; choose closed_form"),
        ({"bias_gradient": "triton"}, "bias_gradient: triton: they are kernels for GPUs; choose torch"),
        ({"compile": "reduce-overhead"}, "choose default"),
        ({"compile": "max-autotune"}, "choose max-autotune-no-cudagraphs"),
        ({"device": "cuda", "threads": 2}, "leave it at default"),
        (
            {"sharding": "zero1"},
            "sharding: zero1: one rank has nobody to share with; choose a world_size above 1",
        ),
        (
            {"device": "mps", "sharding": "fsdp2", "world_size": 2},
            "no such sharding on this device; choose none",
        ),
        (
            {"device": "xla", "sharding": "zero1", "world_size": 2},
            "no such sharding on this device; choose none",
        ),
        (
            {"device": "cuda", "sharding": "zero2", "world_size": 2, "compile": "reduce-overhead"},
            "CUDA graphs need weights that stay in place, and sharding moves them; choose default",
        ),
        (
            {"device": "cuda", "attention": "flash"},
            "takes bfloat16 and float16 only; choose efficient, or set autocast",
        ),
        ({"device": "mps", "allocator": "thp"}, "this device has memory of its own; choose system"),
        ({"device": "cuda", "products": "tuned"}, "choose whole"),
        ({"clip": "in_step"}, "clip: in_step: .* set adamw to fused or compiled"),
        ({"clip": "in_step", "adamw": "fused", "autocast": "float16"}, "choose separate"),
        (
            {"adamw": "compiled", "sharding": "zero1", "world_size": 2},
            "the compiled step knows no shards; choose fused",
        ),
        ({"weight_casts": "optimizer"}, "weight_casts: optimizer: needs autocast: bfloat16"),
        ({"weight_casts": "optimizer", "autocast": "bfloat16"}, "needs adamw: compiled"),
        ({**CASTS, "clip": "separate"}, "needs clip: in_step"),
        ({**CASTS, "tied_gradient": "scatter"}, "needs tied_gradient: rows"),
        (
            {**CASTS, "grad_accum_steps": 2},
            "added up in bfloat16; choose forward, or one rank and a larger micro-batch",
        ),
        ({"compile_region": "block"}, "compile_region: block: nothing is compiled; set compile"),
        (
            {"compile": "default", "compile_region": "block", "world_size": 2},
            "several ranks cut the graph where they exchange; choose model",
        ),
        ({"residual": "bfloat16"}, "residual: bfloat16: needs autocast: bfloat16"),
        ({"weights": "bfloat16", "autocast": "bfloat16"}, "weights: bfloat16: needs adamw: compiled"),
        ({**CASTS, "weights": "bfloat16"}, "needs weight_casts: forward"),
        (
            {"weights": "bfloat16", "autocast": "bfloat16", "adamw": "compiled", "grad_accum_steps": 2},
            "added up in bfloat16; choose float32, or one rank and a larger micro-batch",
        ),
        ({"float8": "rowwise"}, "only newer GPUs have such units; choose none"),
        ({"device": "cuda", "float8": "rowwise"}, "float8: rowwise: needs autocast: bfloat16"),
        ({"affinity": "pinned", "world_size": 2}, "all ranks would share the first cores; choose free"),
        ({"device": "mps", "affinity": "pinned"}, "choose free"),
        ({"allocator": "expandable"}, "only CUDA's memory has segments; choose system"),
        ({"compile": "coordinate-descent"}, "choose default"),
        ({"compile": "gemm"}, "choose default"),
        ({"device": "cuda", "reductions": "apart"}, "nothing is compiled; set compile"),
        ({"launch": "graph"}, "CUDA graphs exist on CUDA only; choose ops"),
        ({**GRAPH, "adamw": "foreach"}, "asks nothing of the host: set adamw to fused"),
        ({**GRAPH, "compile": "reduce-overhead"}, "set compile to default"),
        (
            {**GRAPH, "autocast": "float16"},
            "float16's scaler asks the device in each step; set autocast to bfloat16",
        ),
        ({**GRAPH, "world_size": 2}, "exchanges between ranks are not recorded; choose ops"),
        ({"attention": "flash3"}, "FlashAttention-3 is for Hopper GPUs; choose sdpa"),
        ({"device": "cuda", "attention": "flash3"}, "set autocast"),
        ({"attention": "flex"}, "FlexAttention trains on CUDA only; choose sdpa"),
        ({"device": "cuda", "attention": "flex"}, "uncompiled it materialises the scores; set compile"),
        ({"device": "cuda", "attention": "blocks"}, "only a CPU's library gains by it; choose flash"),
        ({"device": "cuda", "attention": "brgemm"}, "it is a kernel for CPUs; choose flash"),
        (
            {"device": "cuda", "compile": "reduce-overhead", "grad_accum_steps": 2},
            "CUDA graphs do not accumulate gradients; choose max-autotune-no-cudagraphs",
        ),
    ],
)
def test_what_a_device_cannot_do_is_refused_with_reason_and_remedy(changes: dict, reason: str) -> None:
    with pytest.raises(UnsupportedToggle, match=reason):
        find(Toggles(**changes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(UnsupportedToggle, match="no CUDA device here"):
        find(Toggles(device="cuda"))


def test_a_cpu_does_the_baseline_and_the_whole_cpu_ladder() -> None:
    check(Toggles(), Cpu())
    top = Toggles(autocast="bfloat16", attention="flash", compile="default", adamw="fused", world_size=2)
    check(top, Cpu())


def test_a_refusal_always_says_what_to_do_instead() -> None:
    for toggle in fields(Toggles):
        for only in toggle.metadata["only"].values():
            assert "choose" in only.otherwise, toggle.name


@pytest.mark.parametrize(
    ("value", "config"),
    [
        ("default", {}),
        ("reduce-overhead", {"triton.cudagraphs": True}),
        ("coordinate-descent", {"coordinate_descent_tuning": True}),
        ("gemm", {"max_autotune_gemm": True, "triton.decompose_k_threshold": 8}),
        (
            "gemm+coordinate-descent",
            {"max_autotune_gemm": True, "triton.decompose_k_threshold": 8, "coordinate_descent_tuning": True},
        ),
        ("max-autotune-no-cudagraphs", {"max_autotune": True, "coordinate_descent_tuning": False}),
        (
            "max-autotune",
            {"max_autotune": True, "triton.cudagraphs": True, "coordinate_descent_tuning": False},
        ),
    ],
)
@pytest.mark.parametrize("region", ["model", "block"])
def test_each_value_of_compile_tunes_what_its_name_says_and_no_more(
    value: str, config: dict[str, bool], region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what Inductor is told, of each part that is compiled; nothing is compiled here."""
    told: list[dict[str, bool]] = []
    compiler = torch._TorchCompileInductorWrapper
    init = compiler.__init__
    monkeypatch.setattr(
        compiler,
        "__init__",
        lambda self, *args, **named: init(self, *args, **named) or told.append(self.config),
    )
    monkeypatch.setenv("DISABLE_CUPTI_LAZY_REINIT", "1")  # which torch sets under CUDA graphs
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    toggles = replace(Toggles(device="cuda"), compile=value, compile_region=region)
    wrap_model(toggles, build(model_config(toggles, PRESETS["tiny"]), 0, torch.device("cpu")), Cpu())
    assert told == [config] * (1 if region == "model" else 4)  # two blocks, embedding and loss


def test_reductions_apart_is_an_option_beside_those_of_the_mode() -> None:
    from torch._inductor.config import get_config_copy  # type: ignore[attr-defined]

    toggles = Toggles(device="cuda", compile="reduce-overhead", reductions="apart")
    assert compile_options(toggles) == {"triton.cudagraphs": True, "triton.mix_order_reduction": False}
    assert "triton.mix_order_reduction" in get_config_copy()  # or this torch does not know it


def test_torch_s_own_modes_are_still_those_that_ours_are_made_of() -> None:
    """If this fails, max-autotune of this torch is more than autotuning: see that it stays one lever."""
    from torch._inductor import list_mode_options

    tuned = {"max_autotune", "coordinate_descent_tuning", "triton.cudagraphs"}
    for mode in ("max-autotune", "max-autotune-no-cudagraphs"):
        assert set(list_mode_options(mode)) <= tuned


@pytest.mark.parametrize("name", ["vocab_multiple", "micro_batch_size", "compile"])
def test_what_yaml_made_of_yes_is_no_value(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: YAML reads on, off, yes and no as true and false"):
        replace(Toggles(), **{name: True})


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "float32"),
        ({"attention": "sdpa", "compile": "default", "adamw": "fused", "vocab_multiple": 64}, "float32"),
        ({"matmul_precision": "high"}, "tf32"),
        ({"matmul_precision": "medium"}, "bfloat16"),
        ({"autocast": "bfloat16", "matmul_precision": "high"}, "bfloat16"),
    ],
)
def test_the_precision_class_is_the_coarsest_arithmetic_switched_on(changes: dict, precision: str) -> None:
    assert LOSS_TOLERANCE[Toggles(**changes).precision_class()] == LOSS_TOLERANCE[precision]


def test_accumulation_follows_from_the_tokens_per_step_of_the_workload() -> None:
    workload = Workload(model="tiny", seq_len=128, tokens_per_step=4096)
    assert resolve(workload, Toggles(micro_batch_size=4, world_size=2)).grad_accum_steps == 4


@pytest.mark.parametrize("tokens_per_step", [100, 128 * 3, 128])
def test_tokens_per_step_that_do_not_divide_are_refused(tokens_per_step: int) -> None:
    workload = Workload(model="tiny", seq_len=128, tokens_per_step=tokens_per_step)
    with pytest.raises(ValueError, match="is not a multiple of 256"):
        resolve(workload, Toggles(micro_batch_size=2))


@pytest.mark.parametrize(("multiple", "rows"), [(1, 50257), (64, 50304), (128, 50304)])
def test_the_vocabulary_is_padded_to_a_multiple(multiple: int, rows: int) -> None:
    toggles = replace(Toggles(), vocab_multiple=multiple)
    assert model_config(toggles, PRESETS["gpt2"]).padded_vocab_size == rows


def test_weight_decay_is_on_matrices_and_embeddings_only() -> None:
    model = build(PRESETS["tiny"], 0, torch.device("cpu"))
    decayed, free = make_optimizer(Toggles(), Workload(model="tiny", seq_len=128), model).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert free["weight_decay"] == 0.0
    layers = {names[id(p)].rsplit(".", 2)[-2] for p in decayed["params"]}
    assert layers == {"wte", "wpe", "c_attn", "c_proj", "c_fc"}
    assert all(names[id(p)].endswith("bias") or "ln_" in names[id(p)] for p in free["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(names)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_are_set_before_the_interpreter_starts(threads: int) -> None:
    found = environment(Toggles(threads=threads))
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == (str(threads), str(threads))


def test_ranks_share_the_cores_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8)
    monkeypatch.setattr("gpt2.hardware.host.one_cpu_per_core", lambda: list(range(16)))
    assert environment(Toggles())["OMP_NUM_THREADS"] == "8"
    assert environment(Toggles(world_size=2))["OMP_NUM_THREADS"] == "4"
    assert environment(Toggles(world_size=99))["OMP_NUM_THREADS"] == "1"


@pytest.mark.usefixtures("process_settings")
def test_no_kernel_stays_switched_off_from_a_rung_before() -> None:
    configure_process(Toggles(attention="math"), Cpu())
    assert not torch.backends.cuda.flash_sdp_enabled()
    configure_process(Toggles(attention="sdpa"), Cpu())
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize(
    ("changes", "number_format"),
    [
        ({}, "float32"),
        ({"autocast": "float16"}, "float16"),
        ({"matmul_precision": "high"}, "tf32"),
        ({"matmul_precision": "medium"}, "bfloat16"),
        ({"autocast": "bfloat16", "matmul_precision": "high"}, "bfloat16"),
    ],
)
def test_the_format_of_products_is_that_of_autocast_or_else_of_float32_products(
    changes: dict, number_format: str
) -> None:
    assert Toggles(**changes).product_format() == number_format


def test_a_loss_that_this_torch_does_not_have_is_refused_with_the_version_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    said = r"has no linear_cross_entropy; take 2\.13, or choose closed_form"
    with pytest.raises(UnsupportedToggle, match=said):
        find(Toggles(cross_entropy="linear"))


@pytest.mark.parametrize("name", ["tcmalloc", "jemalloc"])
def test_an_allocator_that_is_not_here_is_refused_with_what_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt2.hardware.host.find_library", lambda library: None)
    with pytest.raises(UnsupportedToggle, match=rf"there is no lib{name}\w* here; apt-get install lib{name}"):
        find(Toggles(allocator=name))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "set_so_far"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128"),
        # torch reads this one only where there is none for CUDA.
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:False"),
    ],
)
def test_expandable_segments_are_added_to_what_the_user_set(
    variable: str, set_so_far: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, set_so_far)
    found = environment(Toggles(device="cuda", allocator="expandable"))
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128,expandable_segments:True"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system keeps no thread on a core")
@pytest.mark.parametrize("affinity", ["free", "pinned"])
@pytest.mark.parametrize("allocator", ["system", "thp", "tcmalloc", "jemalloc", "expandable"])
def test_a_process_that_has_the_variables_of_its_toggles_wants_no_others(
    allocator: str, affinity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would start itself anew for ever."""
    toggles = Toggles(allocator=allocator, affinity=affinity)  # type: ignore[arg-type]
    wanted = environment(toggles)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    assert environment(toggles) == wanted


def output_under(toggles: Toggles, program: str) -> str:
    """What a program prints in a process that has the toggles from its start."""
    try:
        check(toggles, Cpu())
    except UnsupportedToggle as missing:
        pytest.skip(str(missing))
    environ = {**os.environ, **environment(toggles)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system keeps no thread on a core")
def test_pinned_threads_stay_on_a_core_each_and_still_know_how_many_cores_there_are() -> None:
    program = (
        "from types import SimpleNamespace; import torch; from gpt2.training.stages import configure_process;"
        "from gpt2.device import Cpu; from gpt2.hardware.host import usable_cores;"
        "from gpt2.proofs.prove import affinity; from gpt2.config.toggles import Toggles;"
        "configure_process(Toggles(affinity='pinned'), Cpu()); torch.ones(2**22).exp();"
        "found = affinity(SimpleNamespace(toggles=Toggles(affinity='pinned')));"
        "print(usable_cores(), torch.get_num_threads(), found.evidence); raise SystemExit(not "
        "found.took_effect)"
    )
    cores, threads = output_under(Toggles(affinity="pinned"), program).split()[:2]
    assert (int(cores), int(threads)) == (usable_cores(), usable_cores())


@pytest.mark.parametrize(("places", "cores"), [("{0},{2},{4}", 3), ("{0:4}", 16), ("cores", 16)])
def test_only_places_of_one_processor_each_tell_how_many_cores_there_are(
    monkeypatch: pytest.MonkeyPatch, places: str, cores: int
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 16)
    monkeypatch.setattr("gpt2.hardware.host.one_cpu_per_core", lambda: list(range(16)))
    monkeypatch.setenv("OMP_PLACES", places)
    assert usable_cores() == cores


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux only")
@pytest.mark.parametrize("name", ["system", "tcmalloc", "jemalloc"])
def test_memory_that_nothing_uses_any_more_is_given_back_by_each_allocator(name: str) -> None:
    program = (
        "import psutil, torch; from gpt2.device import Cpu; resident = lambda: "
        "psutil.Process().memory_info().rss;kept = [torch.ones(2**14) for _ in range(4000)]; del kept[:-1]; "
        "before = resident();Cpu().release_memory(); print(before - resident())"
    )
    given = output_under(Toggles(allocator=name), program)  # type: ignore[arg-type]
    assert int(given) > 200 * 2**20  # of 250 MiB


@pytest.mark.parametrize("name", ["thp", "tcmalloc", "jemalloc"])
def test_an_allocator_takes_effect_in_a_process_that_has_it_from_its_start(name: str) -> None:
    program = (
        "from types import SimpleNamespace as Made; from gpt2.device import Cpu;"
        "from gpt2.proofs.prove import allocator; from gpt2.config.toggles import Toggles;"
        f"found = allocator(Made(toggles=Toggles(allocator={name!r}), training=Made(device=Cpu())));"
        "print(found.evidence); raise SystemExit(not found.took_effect)"
    )
    output_under(Toggles(allocator=name), program)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"attention": "flash2"}, {"adamw": "Fused"}, {"autocast": "bf16"}, {"vocab_multiple": 7}]
)
def test_a_value_that_a_toggle_does_not_have_is_refused_wherever_toggles_are_made(
    wrong: dict[str, Any],
) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}: {value!r} is not one of "):
        replace(Toggles(), **wrong)


def test_two_hyperthreads_of_a_core_are_one_core_wherever_a_process_may_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8)
    monkeypatch.setattr("gpt2.hardware.host.one_cpu_per_core", lambda: [0, 1])  # of processors 0, 1, 8 and 9
    assert usable_cores() == 2


def test_a_fraction_is_no_value_of_a_toggle() -> None:
    with pytest.raises(ValueError, match=r"micro_batch_size 1\.5: should be a whole number"):
        Toggles(micro_batch_size=1.5)  # type: ignore[arg-type]
