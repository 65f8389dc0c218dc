"""The fastest products of float32 matrices that a device has."""

import torch


def fast_matmul(device: torch.device) -> None:
    """Multiply in TF32 on a GPU that has it, and by oneDNN on AMD's CPUs with AVX-512.

    Torch multiplies float32 matrices on a CPU by Intel's MKL. On AMD's CPUs with AVX-512, oneDNN
    is twice as fast: a product of 256 x 256 matrices takes 140 instead of 290 us, though one of
    64 x 64 takes 14 instead of 7. Torch uses oneDNN for float32 only if it may compute in bfloat16
    ("medium"). On CPUs without AMX, oneDNN computes in float32 all the same; a test checks it.
    """
    on_cpu = device.type == "cpu"
    torch.set_float32_matmul_precision("medium" if on_cpu and onednn_is_faster() else "high")


def onednn_is_faster() -> bool:
    """Whether oneDNN computes in float32 here, and faster than MKL for widths of 256 and more."""
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return False
    cpu = torch.cpu.get_capabilities()
    amx = cpu.get("amx_tile", False)
    return "AMD" in cpu.get("cpu_name", "") and cpu.get("avx512_f", False) and not amx
