"""From kernel source to machine code, and for which GPUs."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from typing import Any

from glm53serve.home import user_cache


class CudaUnavailable(RuntimeError):
    """There is no usable NVIDIA GPU, or a package is missing; the message says which."""


class CudaUnsupported(CudaUnavailable):
    """There is a GPU, and the kernels cannot run on it; the message says what was found and what is needed."""


def refusal(name: str, major: int, minor: int) -> str | None:
    """Why a GPU of this compute capability cannot run the kernels; None when it can.

    Only 9.0 has the warpgroup products (wgmma) that prompts of wide models run on: newer architectures left them out again. Older ones also lack the
    copy engine that feeds them, dependent launches and bf16 subtraction.
    """
    if (major, minor) == (9, 0):
        return None
    return f"{name} has compute capability {major}.{minor}; the kernels need 9.0 (H100, H200, GH200), for its warpgroup products (wgmma)"


def checked(result: Any) -> Any:
    """The values of a call of the bindings without its error code. Raises RuntimeError for one."""
    error, *rest = result if isinstance(result, tuple) else (result,)
    if int(error) != 0:
        raise RuntimeError(f"CUDA driver: {error}")
    return rest[0] if len(rest) == 1 else tuple(rest)


def compiled(name: str, text: str, sizes: Mapping[str, int]) -> bytes:
    """Machine code of a source compiled with these defines, from the user's cache when it was compiled before. Raises CudaUnsupported with the log."""
    try:
        from cuda.bindings import nvrtc

        version = str(nvrtc.nvrtcVersion()).encode()
    except (ImportError, RuntimeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise CudaUnsupported(f"NVRTC, which compiles the kernels, cannot be loaded (install glm53serve[cuda] or a CUDA 13 toolkit): {why}") from error
    options = [b"--gpu-architecture=sm_90a", b"-std=c++17"]
    options += [f"-D{key}={value}".encode() for key, value in sorted(sizes.items())]
    digest = hashlib.sha256(b"\0".join([text.encode(), version, *options])).hexdigest()
    cache = user_cache()
    stored = None if cache is None else cache / "cuda" / f"{name}-{digest[:32]}.cubin"
    if stored is not None and stored.exists():
        return stored.read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], []))
    failed = int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0])
    if failed:
        log = b" " * int(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaUnsupported(f"kernels {name}: {log.decode(errors='replace')[:2000]}")
    cubin = b" " * int(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    if stored is not None:
        with contextlib.suppress(OSError):  # without a place to keep it, the next start compiles again
            stored.parent.mkdir(parents=True, exist_ok=True)
            made = stored.with_suffix(f".{os.getpid()}.tmp")
            made.write_bytes(cubin)
            made.replace(stored)
    return cubin
