"""transformers as the oracle: the library's own float32 run, and the same modelling file widened to float64.

The float64 module is the library's source text with every float32 cast replaced, executed in memory under another name. It is
the same program with less rounding, so a disagreement with it is a mistake and not an accumulation of roundings.
"""

from __future__ import annotations

import json
import linecache
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers.models.glm5_next import configuration_glm5_next as configuration
from transformers.models.glm5_next import modeling_glm5_next as library
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

Tensors = dict[str, torch.Tensor]

PACKAGE = "transformers.models.glm5_next"
TINY_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "projection_intermediate_size": 16}


@dataclass
class Gaps:
    """The smallest distances to another discrete choice seen in a run, and how many rows really dropped tokens.

    index: selected versus rejected pool scores (model spec 5.3); expert and group: selected versus rejected routing scores
    (model spec 6). Infinity where no choice had to be made. `dropping` and `rows` count (layer, row) pairs of full DSA layers.
    """

    index: float = float("inf")
    expert: float = float("inf")
    group: float = float("inf")
    dropping: int = 0
    rows: int = 0

    def see_index(self, scores: torch.Tensor, valid: torch.Tensor, keep: int) -> None:
        """Called from the widened indexer with scores and candidate mask [1, T, pools]."""
        for row, ok in zip(scores[0], valid[0], strict=True):
            self.rows += 1
            candidates = row[ok].sort(descending=True).values
            if len(candidates) > keep:
                self.dropping += 1
                self.index = min(self.index, float(candidates[keep - 1] - candidates[keep]))

    def see_cut(self, kind: str, scores: torch.Tensor, keep: int) -> None:
        """Called from the widened router with scores [T, n] of which the `keep` largest are taken."""
        if keep >= scores.shape[-1]:
            return
        ordered = scores.sort(dim=-1, descending=True).values
        gap = float((ordered[:, keep - 1] - ordered[:, keep]).min())
        setattr(self, kind, min(getattr(self, kind), gap))


def replace_once(text: str, old: str, new: str) -> str:
    """`text` with its only occurrence of `old` replaced; an error when the library's file is not the one we know."""
    if text.count(old) != 1:
        raise SystemExit(f"modelling file: expected one occurrence of {old!r}, found {text.count(old)}")
    return text.replace(old, new)


def widened_module(name: str = "f64", edits: tuple[tuple[str, str], ...] = ()) -> ModuleType:
    """The modelling file with float64 in place of float32 and gap recording at its choices; `edits` are further replacements."""
    text = Path(library.__file__).read_text()
    for old, new in edits:
        text = replace_once(text, old, new)
    text = re.sub(r"torch\.float32|torch\.float\b", "torch.float64", text).replace(".float()", ".double()")
    recorded = (
        ("        selected = index_scores.topk(select_k, dim=-1).indices\n", "GAPS.see_index(index_scores, valid_candidates, select_k)"),
        ("        group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]\n", "GAPS.see_cut('group', group_scores, self.topk_group)"),
        (
            "        topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]\n",
            "GAPS.see_cut('expert', scores_for_choice, self.top_k)",
        ),
    )
    for line, record in recorded:
        text = replace_once(text, line, f"        {record}\n{line}")
    module = ModuleType(f"{PACKAGE}.modeling_{name}")
    module.__package__ = PACKAGE
    module.__file__ = str(Path(library.__file__).with_name(f"modeling_{name}.py"))  # no such file; the library reads names from the path
    module.__dict__["GAPS"] = Gaps()
    sys.modules[module.__name__] = module
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


def wrapper_config(config: dict[str, Any]) -> Any:
    """The library's reading of a config.json, nested or flat, with a very small vision tower and no quantiser."""
    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "vision_config")}
    if "text_config" not in plain and plain.get("model_type") == "glm5_next_text":
        text = configuration.Glm5NextTextConfig.from_dict(plain)
        plain = {"model_type": "glm5_next", "text_config": text.to_dict(), "tie_word_embeddings": plain.get("tie_word_embeddings", False)}
    result = configuration.Glm5NextConfig.from_dict({**plain, "vision_config": {**TINY_VISION, "out_hidden_size": 16}})
    for part in (result, result.text_config):
        part._attn_implementation = "sdpa"
        part._experts_implementation = "eager"
    return result


class Oracle:
    """One model in the library: float32 as it ships, and float64."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, wide: ModuleType) -> None:
        """`tensors` are float32 under the on-disk names with the `model.language_model.` prefix; the library's own loader maps them."""
        self.config = wrapper_config(config)
        with tempfile.TemporaryDirectory() as folder:
            save_file({k: v.contiguous() for k, v in tensors.items()}, f"{folder}/model.safetensors", metadata={"format": "pt"})
            Path(folder, "config.json").write_text(json.dumps(self.config.to_dict(), default=str))
            loaded, info = library.Glm5NextForConditionalGeneration.from_pretrained(
                folder, config=self.config, dtype=torch.float32, output_loading_info=True, attn_implementation="sdpa", experts_implementation="eager"
            )
        absent = [k for k in info["missing_keys"] if "visual" not in k]
        strange = [k for k in info["unexpected_keys"] if f"layers.{self.config.text_config.num_hidden_layers}." not in k]
        if absent or strange or info["mismatched_keys"]:
            raise SystemExit(f"the library could not load the model: missing {absent}, unexpected {strange}, mismatched {info['mismatched_keys']}")
        self.text = loaded.model.language_model.eval()
        self.head = loaded.lm_head
        self.wide = wide
        self.text64 = wide.Glm5NextTextModel(self.config.text_config).double().eval()
        self.text64.load_state_dict(self.text.state_dict())
        self.head64 = loaded.lm_head.weight.detach().double()

    @torch.no_grad()
    def logits32(self, ids: list[int]) -> NDArray[np.float32]:
        """Full prefill in the library, float32: [T, V]."""
        return self.head(self.text(torch.tensor([ids]), use_cache=False).last_hidden_state)[0].numpy()

    @torch.no_grad()
    def logits64(self, ids: list[int]) -> tuple[NDArray[np.float64], Gaps]:
        """Full prefill in float64, [T, V], and the gaps of its choices."""
        gaps = self.wide.__dict__["GAPS"] = Gaps()
        hidden = self.text64(torch.tensor([ids]), use_cache=False).last_hidden_state
        logits = torch.nn.functional.linear(hidden, self.head64)[0]
        assert logits.dtype == torch.float64
        return logits.numpy(), gaps

    @torch.no_grad()
    def greedy32(self, ids: list[int], count: int, stop: tuple[int, ...] = ()) -> list[int]:
        """Greedy continuation by the library with its cache, one token a call; ends after a token of `stop`."""
        out, chunk, cache = [], list(ids), None
        while len(out) < count and not (out and out[-1] in stop):
            result = self.text(torch.tensor([chunk]), use_cache=True, cache=cache)
            cache = result.cache
            out.append(int(self.head(result.last_hidden_state[:, -1]).argmax()))
            chunk = out[-1:]
        return out


def greedy_gap(logits: NDArray[np.float64]) -> float:
    """Smallest distance between the best and the second best logit over rows."""
    two = np.sort(logits, axis=-1)[:, -2:]
    return float((two[:, 1] - two[:, 0]).min())
