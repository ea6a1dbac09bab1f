"""Run llama.cpp's own converter on a model without a text tokenizer: `python bench/peers_gguf.py LLAMA_SOURCE MODEL OUT.gguf`.

Runs under a Python that has torch and transformers. The converter wants a published tokenizer; random weights have none, so it writes
a vocabulary of type none.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Convert to a float32 file."""
    source, model, out = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    kind = import_module("conversion.glm").Glm5NextModel
    kind.set_vocab = lambda self: self._set_vocab_none()
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", "f32"]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
