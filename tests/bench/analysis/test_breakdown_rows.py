"""What ran in a step, and on what it spent its time: events made by hand, and a step that really ran."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from samples import measurement, record
from trainings import FOUR, start

from bench.analysis.scoreboard import scoreboard
from bench.records.record import Record
from bench.report.one_run.tables import WORK, profile_table
from gpt2.config.toggles import Toggles
from gpt2.hardware.host import missing_brgemm
from gpt2.proofs.breakdown import KINDS, breakdown
from gpt2.proofs.profiler import attention_kernel_kind, is_matmul_kernel, ops_of, recorded
from gpt2.proofs.profiler import record as record_step


@dataclass(frozen=True)
class Event:
    """As the profiler has them; times in milliseconds."""

    label: str
    start: float
    end: float
    kind: str = "CPU"
    thread: int = 0

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return int(self.start * 1e6)

    def end_ns(self) -> int:
        return int(self.end * 1e6)

    def duration_ns(self) -> int:
        return self.end_ns() - self.start_ns()

    def start_thread_id(self) -> int:
        return self.thread

    annotation: bool = False

    def is_user_annotation(self) -> bool:
        return self.annotation

    def dtypes(self) -> list[str]:
        return []

    def shapes(self) -> list[list[int]]:
        return []

    def device_type(self) -> object:
        class Kind:
            name = self.kind

        return Kind


def milliseconds(seconds: float, *events: Event) -> dict[str, float]:
    return {kind: round(1e3 * taken, 6) for kind, taken in breakdown(recorded(events, seconds / 1e3)).items()}


def test_an_operation_has_its_own_time_without_that_of_operations_within_it() -> None:
    found = milliseconds(
        12,
        Event("## Call CompiledFxGraph abc", 0, 10),
        Event("aten::addmm", 1, 4),
        Event("aten::copy_", 2, 3),
        Event("aten::_scaled_dot_product_flash_attention_for_cpu", 5, 7),
        Event("aten::bmm", 7, 8),
    )
    assert found == {"products": 2, "attention": 3, "compiled": 4, "copies": 1, "rest": 2}


def test_what_runs_within_an_operator_of_ours_or_in_the_optimisers_step_is_theirs() -> None:
    found = milliseconds(
        10,
        Event("gpt2::product", 0, 4),
        Event("aten::mm", 0, 2),
        Event("aten::copy_", 2, 3),
        Event("Optimizer.step#AdamW.step", 5, 9),
        Event("aten::copy_", 6, 7),
    )
    assert found == {"products": 4, "optimizer": 4, "rest": 2}


def test_operations_of_other_threads_are_not_within_those_of_this_one() -> None:
    found = milliseconds(4, Event("aten::mm", 0, 4), Event("c10d::allreduce_", 1, 2, thread=7))
    assert found == {"products": 4, "exchange": 1}


def test_on_an_accelerator_spans_named_by_the_program_are_no_kernels() -> None:
    found = milliseconds(
        10,
        Event("## Call CompiledFxGraph abc", 0, 4, "CUDA", annotation=True),
        Event("sm90_xmma_gemm_bf16bf16_bf16f32", 0, 4, "CUDA"),
        Event("Optimizer.step#CompiledAdamW.step", 5, 8, "CUDA", annotation=True),
        Event("triton_poi_fused_add_0", 5, 7, "CUDA"),
        Event("triton_poi_fused_gelu_0", 9, 10, "CUDA"),
    )
    assert found == {"products": 4, "compiled": 1, "optimizer": 2, "rest": 3}


@pytest.mark.parametrize("name", ["cross_entropy", "gelu_backward", "join_gradients"])
def test_our_kernels_in_triton_count_with_those_that_torch_compile_generated(name: str) -> None:
    assert milliseconds(4, Event(name, 0, 4, "CUDA")) == {"compiled": 4}


def test_on_an_accelerator_kernels_count_and_the_host_does_not() -> None:
    found = milliseconds(
        10,
        Event("aten::mm", 0, 9),
        Event("sm90_xmma_gemm_bf16bf16_bf16f32", 0, 4, "CUDA"),
        Event("flash_fwd_kernel", 4, 5, "CUDA"),
        Event("triton_poi_fused_gelu_0", 5, 6, "CUDA"),
        Event("multi_tensor_apply_kernel<FusedAdam>", 6, 8, "CUDA"),
        Event("Memcpy HtoD (Pinned -> Device)", 8, 8.5, "CUDA"),
        Event("ncclDevKernel_AllReduce", 8, 9, "CUDA"),
    )
    kinds = {"products": 4, "attention": 1, "compiled": 1, "optimizer": 2}
    assert found == {**kinds, "copies": 0.5, "exchange": 1, "rest": 0.5}


GRAPH, GEMM = "## Call CompiledFxGraph abc", "sm90_xmma_gemm_bf16bf16_bf16f32"


def names(*events: Event) -> list[str]:
    return [op.name for op in ops_of(recorded(events, 1.0))]


@pytest.mark.parametrize("length", [0.05, 0.6, 20.0])
def test_calls_of_one_name_in_a_row_all_count_however_long_the_kernels_that_they_launch_run(
    length: float,
) -> None:
    calls = [Event(GRAPH, n / 5, n / 5 + 0.1) for n in range(12)]
    kernels = [Event(GEMM, call.start + 0.05, call.start + 0.05 + length, "CUDA") for call in calls]
    assert sorted(names(*calls, *kernels)) == [GRAPH] * 12 + [GEMM] * 12


@pytest.mark.parametrize("ends", [(9, 10), (10, 9), (6, 6)], ids=["in turn", "the first last", "at once"])
def test_kernels_of_one_name_that_overlap_all_count(ends: tuple[float, float]) -> None:
    launches = [Event("aten::mm", 0, 1), Event("aten::addmm", 1, 2)]
    kernels = [Event(GEMM, 3 + number, end, "CUDA") for number, end in enumerate(ends)]
    assert names(*launches, *kernels) == ["aten::mm", "aten::addmm", GEMM, GEMM]


def test_what_begins_while_a_kernel_runs_is_not_within_the_op_that_launched_it() -> None:
    found = names(
        Event("gpt2::add_rows", 0, 1),
        Event("aten::index_add_", 0.2, 0.8),
        Event("indexFuncLargeIndex", 0.5, 9, "CUDA"),
        Event("aten::mm", 2, 3),
        Event(GEMM, 9, 12, "CUDA"),
        Event("gpt2::add_rows", 4, 5),
    )
    assert found == ["gpt2::add_rows", "indexFuncLargeIndex", "aten::mm", "gpt2::add_rows", GEMM]


def test_ops_of_two_threads_are_told_apart_with_kernels_that_bear_their_launchers_thread() -> None:
    found = names(
        Event("aten::mm", 0, 2, thread=1),
        Event(GEMM, 1, 9, "CUDA", thread=1),
        Event("aten::mm", 1.5, 3, thread=2),
        Event(GEMM, 2, 8, "CUDA", thread=2),
        Event("aten::mm", 4, 5, thread=1),
        Event("aten::mm", 4.1, 4.9, thread=1),  # which autocast passed on
    )
    assert found == ["aten::mm", GEMM, "aten::mm", GEMM, "aten::mm"]


def test_an_exchange_that_goes_on_while_the_next_begins_does_not_enclose_it() -> None:
    times = ((1.2, 3.7), (3.2, 9))
    exchanges = [Event("nccl:all_reduce", start, end, annotation=True) for start, end in times]
    found = names(Event("c10d::allreduce_", 1, 2), Event("c10d::allreduce_", 3, 4), *exchanges)
    assert found == ["c10d::allreduce_", "nccl:all_reduce"] * 2


HELPERS = [
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 16, 128>(cudnn::fusion::Params)",
    "void cudnn::fusion::convert_dq_to_16bits<1>(float const*, __nv_bfloat16*)",
    "cudnn::fusion::fmha_reduce_head",
    "_ZN5cudnn6fusion28compute_dot_do_o_specializedILb1ELi128EEEvNS0_6ParamsE",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_kernel0_0",
]


@pytest.mark.parametrize("name", HELPERS)
def test_a_kernel_of_cudnn_s_attention_counts_as_attention_and_helpers_too(name: str) -> None:
    assert attention_kernel_kind(name) == "cudnn"
    found = milliseconds(5, Event(GEMM, 0, 3, "CUDA"), Event(name, 3, 4, "CUDA"))
    assert found == {"products": 3, "attention": 1, "rest": 1}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64>>", "flash"),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64>>", "flash"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", "efficient"),
        ("nvjet_tst_128x256_64x6_2x1_v_bz_TNT", None),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", None),
        ("triton_red_fused_native_layer_norm_dot_3", None),
    ],
)
def test_kernels_of_others_are_not_taken_for_cudnn_s(name: str, kind: str | None) -> None:
    assert attention_kernel_kind(name) == kind
    assert is_matmul_kernel(name) == name.startswith("nvjet")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "blocks", "compile": "default", "adamw": "compiled"},
        pytest.param(
            {"attention": "brgemm"},
            marks=pytest.mark.skipif(bool(missing_brgemm("float32")), reason="not here"),
        ),
    ],
)
def test_the_kinds_of_a_real_step_add_up_to_it(changes: dict) -> None:
    torch.compiler.reset()
    training = start(replace(FOUR, **changes))
    next(training)
    step = record_step(lambda: next(training), training.device)
    found = breakdown(step)
    assert sum(found.values()) == pytest.approx(step.seconds, rel=1e-6)
    assert {"products", "attention", "optimizer"} <= found.keys() <= set(KINDS)
    assert ("compiled" in found) == ("compile" in changes)


def test_the_report_has_a_column_for_each_kind_and_medians_over_rounds() -> None:
    assert list(WORK) == list(KINDS)
    profiled = [{"products": products, "rest": 0.25} for products in (0.5, 0.75, 4.0)]
    rounds = [
        record(repetition=number, measurement=measurement(1e3, profiled_seconds=seconds))
        for number, seconds in enumerate(profiled, 1)
    ]
    table = profile_table(scoreboard(rounds))
    assert table is not None
    (row,) = table.cells
    told = {"Rung": "", "Sum (ms)": "1,000", "Matmuls (ms)": "750", "Rest (ms)": "250"}
    expected = dict.fromkeys(table.head, "-") | told
    assert dict(zip(table.head, row, strict=True)) | {"Rung": ""} == expected


@pytest.mark.parametrize(
    ("device", "kernels", "rest", "total"),
    [("cuda", 0.75, "250", "1,000"), ("cuda", 1.5, "-", "1,500"), ("cpu", 0.75, "4,000", "4,750")],
)
def test_on_a_gpu_rest_is_of_the_window_s_median_step_and_so_without_the_profiler_s_own_cost(
    device: Literal["cpu", "cuda"], kernels: float, rest: str, total: str
) -> None:
    profiled = {"products": kernels, "rest": 4.0}
    found = measurement(1e3, profiled_seconds=profiled, step_seconds=[0.9, 1.0, 3.0])
    table = profile_table(scoreboard([record(toggles=Toggles(device=device), measurement=found)]))
    assert table is not None
    told = dict(zip(table.head, table.cells[0], strict=True))
    assert (told["Rest (ms)"], told["Sum (ms)"]) == (rest, total)
    assert any("median step of the window" in note for note in table.notes) == (device == "cuda")


def test_a_kind_s_ratio_to_the_rung_before_is_shown_where_its_interval_lies_beyond_the_noise_floor() -> None:
    def one(
        rung: str, index: int, repetition: int, tps: float = 1e3, kind: str = "cumulative", **kinds: float
    ) -> Record:
        found = measurement(tps, profiled_seconds=kinds)
        return record(rung, index, repetition, kind=kind, measurement=found)

    records = []
    rounds = ((1.0, 1000, 0.2), (1.1, 1080, 1.1), (1.2, 920, 0.5))  # a floor of some 9 %
    for number, (slow, tps, unlike) in enumerate(rounds, 1):
        records += [
            one("a", 0, number, products=slow, optimizer=slow, copies=0.01, other=slow),
            one("b", 1, number, products=1.04 * slow, optimizer=unlike, attention=slow, other=slow / 4),
            one("a", 0, number, tps, "control", products=slow),
        ]
    table = profile_table(scoreboard(records))
    assert table is not None
    told = dict(zip(table.head, table.cells[1], strict=True))
    assert told["Other operations (ms)"] == "275, 0.25x ±0.0%"
    assert told["Matmuls (ms)"] == "1,144"  # by 4 % in each round, less than the floor
    # Less than half on average, but too unlike from round to round to tell.
    assert told["AdamW (ms)"] == "500"
    assert (told["Attention (ms)"], told["Casts and copies (ms)"]) == ("1,100", "-")


def test_kinds_that_overlap_add_up_to_what_is_called_a_sum_and_not_the_step() -> None:
    events = [Event("aten::mm", 0, 4), Event("c10d::allreduce_", 1, 4, thread=7)]
    overlapping = breakdown(recorded(events, 4e-3))  # of a step of 4 ms
    table = profile_table(scoreboard([record(measurement=measurement(1e3, profiled_seconds=overlapping))]))
    assert table is not None
    assert dict(zip(table.head, table.cells[0], strict=True))["Sum (ms)"] == "7.00"
    assert not any(title.startswith("Step") for title in table.head)


def test_a_run_that_profiled_nothing_has_no_such_table() -> None:
    assert profile_table(scoreboard([record()])) is None
