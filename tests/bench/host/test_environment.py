from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.host import environment
from bench.host.environment import describe, highest_cpu_mhz
from bench.host.telemetry import variables
from bench.records.machine import Environment
from bench.run.worker import _peak_flops
from gpt2.config.toggles import Toggles
from gpt2.device import Cpu
from gpt2.device.xla import Xla
from gpt2.hardware.host import usable_cores
from gpt2.provenance import code_hash


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables():
        monkeypatch.delenv(name)


@pytest.fixture
def preloaded(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2:mine.so")
    monkeypatch.setenv("MALLOC_CONF", "thp:always")


@pytest.mark.usefixtures("preloaded")
def test_variables_that_the_toggles_set_are_not_recorded_as_the_users() -> None:
    given = {"LD_PRELOAD": "libjemalloc.so.2:mine.so", "MALLOC_CONF": "thp:always"}
    assert describe(Cpu(), given).variables == {"LD_PRELOAD": "mine.so"}


@pytest.mark.usefixtures("preloaded")
def test_variables_that_the_user_set_are_recorded() -> None:
    assert describe(Cpu()).variables == {
        "LD_PRELOAD": "libjemalloc.so.2:mine.so",
        "MALLOC_CONF": "thp:always",
    }


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "1"),
        ("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS", "ATEN,TRITON"),
        ("TORCHINDUCTOR_PROFILE", "1"),
        ("TORCHINDUCTOR_AUTOTUNE_CHOICE_NAME_REGEX", r"triton_mm_\d+"),
        ("TORCHINDUCTOR_FILE_LOCK_TIMEOUT", "60"),
        ("TRITON_INTERPRET", "1"),
        ("TRITON_DEFAULT_FP_FUSION", "0"),
        ("ENABLE_PERSISTENT_TMA_MATMUL", "1"),
        ("TORCH_BLAS_PREFER_CUBLASLT", "1"),
        ("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ("CUBLASLT_WORKSPACE_SIZE", "32768"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9"),
        ("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_gpu_enable_triton_gemm=false"),
        ("CUDA_VISIBLE_DEVICES", "MIG-GPU-5ebe9c5a-d0f1/1/0"),
        ("ATEN_CPU_CAPABILITY", "default"),
        ("MKL_CBWR", "COMPATIBLE"),
        ("OMP_THREAD_LIMIT", "1"),
        ("GOMP_CPU_AFFINITY", "0"),
        ("DNNL_MAX_CPU_ISA", "AVX2"),
    ],
)
def test_a_variable_that_changes_the_speed_is_recorded(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert describe(Cpu()).variables == {name: value}
    assert describe(Cpu(), {name: value}).variables == {}


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("name", "value", "recorded"),
    [
        ("TORCHINDUCTOR_CACHE_DIR", "/home/someone/inductor", None),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor", None),
        ("TRITON_CACHE_DIR", "~/triton", None),
        ("TRITON_HOME", "someone", None),
        ("TRITON_PTXAS_PATH", "ptxas", None),
        ("TORCHINDUCTOR_WORKER_LOGPATH", "workers.log", None),
        ("TORCHINDUCTOR_PROFILE_OUTPUT", "profile.txt", None),
        ("TORCHINDUCTOR_REDIS_HOST", "cache.someone.example", None),
        ("TORCHINDUCTOR_NEW", "/home/some one/a folder", None),
        ("TRITON_NEW", r"C:\Users\someone", None),
        ("MALLOC_CONF", "prof_prefix:/home/someone/heap,thp:always", None),
        (
            "XLA_FLAGS",
            "--xla_dump_to=/home/someone/dump --xla_gpu_autotune_level=4",
            "--xla_gpu_autotune_level=4",
        ),
        ("XLA_FLAGS", "--xla_dump_to=/home/some one/dump", None),
        ("XLA_FLAGS", "/home/someone/flags", None),
        ("LIBTPU_INIT_ARGS", "--a=1 --b=~/c --d=e/f", "--a=1"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2:/home/someone/mine.so", "libjemalloc.so.2:mine.so"),
        ("LD_PRELOAD", "/home/someone/mine.so libother.so", "mine.so:libother.so"),
    ],
)
def test_where_a_user_keeps_something_is_never_recorded(
    name: str, value: str, recorded: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert describe(Cpu()).variables == ({name: recorded} if recorded else {})


@pytest.mark.parametrize(
    "source",
    ["gpt2/training/train.py", "gpt2/device/cpu.py", "gpt2/model/attention.cpp", "bench/run/runner.py"],
)
def test_the_hash_of_the_code_changes_with_any_source(source: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("gpt2.provenance.ROOT", tmp_path)
    (tmp_path / source).parent.mkdir(parents=True)
    (tmp_path / source).write_text("x = 1;")
    before = code_hash()
    (tmp_path / source).with_suffix(".md").write_text("not code")
    assert code_hash() == before
    (tmp_path / source).write_text("x = 2;")
    assert code_hash() != before


EPYC = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
GENOA = {"vendor": "AuthenticAMD", "family": "25", "model": "17", "stepping": "1"}
GRAVITON = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (EPYC, GENOA),
        (EPYC + "\n" + EPYC.replace("17", "97"), GENOA),
        (GRAVITON, {"implementer": "0x41", "part": "0xd40"}),
        ("", {}),
    ],
    ids=["AMD", "the first of two", "ARM", "a system that does not tell"],
)
def test_a_record_holds_what_a_cpu_says_it_is(
    cpuinfo: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(environment, "SYSTEM", tmp_path)
    found = describe(Cpu())
    assert found.cpu_identity == expected
    assert Environment.model_validate_json(found.model_dump_json()) == found


def test_a_record_from_before_it_was_kept_is_read() -> None:
    older = describe(Cpu()).model_dump(exclude={"cpu_identity"})
    assert Environment.model_validate(older).cpu_identity == {}


def test_a_worker_s_peak_is_that_of_the_very_cpu_in_its_environment() -> None:
    machine = describe(Cpu()).model_copy(
        update={
            "cpu_flags": ["avx2", "avx512f", "avx512_bf16"],
            "cpu_mhz": 900.0,
            "measured_cpu_mhz": 1000.0,
            "cpu_identity": GENOA,
        }
    )
    on_cpu_by_xla = object.__new__(Xla)
    on_cpu_by_xla._on_cpu = on_cpu_by_xla.shared_by_ranks = True
    for device, toggles in ((Cpu(), Toggles()), (on_cpu_by_xla, Toggles(device="xla", world_size=2))):
        found = _peak_flops(machine, toggles, device, None)
        assert found["peak_flops_bf16"] == 2 * (found["peak_flops_dtype"] or 0) == usable_cores() * 64e9
        assert found["peak_devices"] == 1


CPUINFO = "flags\t\t: fpu amx_tile{}\ncpu MHz\t\t: 2000.000\n"


@pytest.mark.parametrize(
    ("highest", "flags", "expected"),
    [(3800.0, "", 3800.0), (0.0, " hypervisor", 2000.0), (0.0, "", None)],
    ids=["the highest", "in a virtual machine the one it has", "a passing value is none"],
)
def test_the_clock_of_the_cpu(
    highest: float, flags: str, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.psutil, "cpu_freq", lambda: SimpleNamespace(current=1234.5, max=highest))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO.format(flags))
    assert highest_cpu_mhz(tmp_path) == expected


@pytest.mark.parametrize(("flags", "expected"), [(" hypervisor", 3333.0), ("", None)])
def test_the_clock_is_measured_in_a_virtual_machine_alone(
    flags: str, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "measured_mhz", lambda: 3333.0)
    monkeypatch.setattr(environment, "SYSTEM", tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO.format(flags))
    assert describe(Cpu()).measured_cpu_mhz == expected
