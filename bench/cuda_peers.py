"""transformers' own implementation on the same GPU, random weights of the same shape: `python -m bench.cuda_peers [layers] [experts]`.

Needs torch and a transformers with glm5_next. Prints one JSON line: seconds of a prompt of 4,096 tokens and of single steps after it.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any

from glm53serve.model.shapes import shape_config


def build(layers: int, experts: int) -> Any:
    """The model in bf16 on the GPU with normal weights."""
    import torch
    from transformers.models.glm5_next import configuration_glm5_next, modeling_glm5_next

    raw = shape_config("flash", layers, experts, fp8=False)
    config = configuration_glm5_next.Glm5NextConfig(**raw)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = modeling_glm5_next.Glm5NextForConditionalGeneration(config)
    model = model.to_empty(device="cuda").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
        for buffer in model.buffers():
            buffer.zero_()
    return model


def main() -> None:
    """Measure and print."""
    import torch

    model = build(int(sys.argv[1]) if len(sys.argv) > 1 else 8, int(sys.argv[2]) if len(sys.argv) > 2 else 64)
    ids = torch.randint(0, 150000, (1, 4096), device="cuda")
    with torch.inference_mode():
        prefill = []
        for _ in range(2):
            torch.cuda.synchronize()
            began = perf_counter()
            out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()
            prefill.append(perf_counter() - began)
        name = "past_key_values" if getattr(out, "past_key_values", None) is not None else "cache"
        steps = []
        for _ in range(12):
            token = out.logits[:, -1:].argmax(-1)
            began = perf_counter()
            out = model(input_ids=token, use_cache=True, logits_to_keep=1, **{name: getattr(out, name)})
            torch.cuda.synchronize()
            steps.append(perf_counter() - began)
    print(json.dumps({"prefill": min(prefill), "step": sorted(steps)[len(steps) // 2]}))


if __name__ == "__main__":
    main()
