"""Which library multiplies matrices on this CPU, and by which of its kernels, as they say themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from bench.host.checks import Finding

PROGRAM = """
import torch
for dtype in (torch.float32, torch.bfloat16):
    x = torch.ones(256, 256, dtype=dtype)
    print(f"format {str(dtype).removeprefix('torch.')}", flush=True)
    torch.mm(x, x)
"""
SECONDS = 60.0


def matrix_library() -> Finding:
    """Report the library and the kernel of a matmul in float32 and in bfloat16; for information."""
    verbose = {**os.environ, "MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    command = [sys.executable, "-P", "-c", PROGRAM]
    try:
        done = subprocess.run(
            command,
            env=verbose,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Finding(name="matrix library", value="unknown")
    return told(done.stdout)


def told(output: str) -> Finding:
    """Read what MKL (MKL_VERBOSE) and oneDNN (ONEDNN_VERBOSE) printed, beneath each number format."""
    processors = re.search(r"^MKL_VERBOSE .*64 architecture (.+?) processors", output, re.MULTILINE)
    found = []
    for number_format, lines in re.findall(r"^format (\w+)\n((?:(?!format ).*\n?)*)", output, re.MULTILINE):
        if kernel := re.search(r"^onednn_verbose,.*,exec,cpu,matmul,([^,]+),", lines, re.MULTILINE):
            found.append(f"{number_format} by oneDNN ({kernel[1]})")
        elif re.search(r"^MKL_VERBOSE \w*GEMM", lines, re.MULTILINE):
            found.append(f"{number_format} by MKL" + (f" (for {processors[1]})" if processors else ""))
    advice = ""
    if processors and "AVX" not in processors[1].upper() and "Advanced Vector" not in processors[1]:
        advice = "MKL takes a plain path on this maker's CPUs; in float32 products: onednn may be faster"
    return Finding(name="matrix library", value="; ".join(found) or "unknown", advice=advice)
