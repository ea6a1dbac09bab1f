"""The weights of a model directory: checked against the config by their headers, then handed out (model spec 2, 8, 9).

Opening reads headers only. A matrix handed out is memory of its own, read when it is asked for; or, from a checkpoint opened with `mapped`,
a read-only, possibly unaligned view of its file whose pages are read when touched: those files must not change or shrink while it is in
use, or the process dies of a bus error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glm53serve.model import layout
from glm53serve.model.config import FULL, KDA, SPARSE, ModelConfig, load_config
from glm53serve.model.errors import CheckpointError
from glm53serve.model.extents import ExtentReader
from glm53serve.model.inventory import check_names, mtp_layers, sort_out
from glm53serve.model.layout import Need
from glm53serve.model.quant import bf16_to_f32
from glm53serve.model.safetensors_file import TensorInfo, read_directory
from glm53serve.model.stored import Extent, StoredMatrix, check_matrix, check_small, format_of, locate, scale_name
from glm53serve.model.weights import (
    DsaWeights,
    F32Array,
    FfnWeights,
    HyperConnection,
    IndexerWeights,
    KdaWeights,
    LayerWeights,
    Matrix,
    MatrixFormat,
    MoeWeights,
)

Role = Literal["gate", "up", "down"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One contiguous part of a routed expert on disk: `nbytes` bytes at `offset` of `path` are an array of `dtype` and `shape`.

    `role` is gate, up or down for data and gate.scale, up.scale or down.scale; `format` is the matrix's; `tensor` its name in the file.
    """

    path: Path
    offset: int
    nbytes: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    role: str
    format: MatrixFormat
    tensor: str


class Checkpoint:
    """An opened, completely checked model directory; satisfies `ExpertSource`. Made by `open_checkpoint`."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        files: list[Path],
        tensors: dict[str, TensorInfo],
        vision: list[TensorInfo],
        mtp: list[TensorInfo],
        mapped: bool,
    ) -> None:
        self.directory = directory
        self.config = config
        self.files = files
        self.has_vision = bool(vision)
        self.has_mtp = bool(mtp)
        self.vision_bytes = sum(t.nbytes for t in vision)
        self.mtp_bytes = sum(t.nbytes for t in mtp)
        self.has_head = "lm_head.weight" in tensors
        self._extents = ExtentReader(files, mapped)
        self.vision_tensors = vision
        self.mtp_layers = sorted({int(canonical.split(".")[1]) for t in mtp if (canonical := layout.canonical(t.name)) is not None})
        self._tensors = tensors
        self._into = Need((config.moe_intermediate_size, config.hidden_size), True)
        self._out = Need((config.hidden_size, config.moe_intermediate_size), True)
        self._into_packed = Need((config.n_routed_experts, 2 * config.moe_intermediate_size, config.hidden_size), True)
        self._out_packed = Need((config.n_routed_experts, config.hidden_size, config.moe_intermediate_size), True)
        routed = sum(t.nbytes for name, t in tensors.items() if ".mlp.experts." in name)
        self.expert_bytes = routed - sum(t.nbytes for t in mtp if ".mlp.experts." in t.name)
        self.dense_bytes = sum(t.nbytes for t in tensors.values()) - self.mtp_bytes - self.expert_bytes
        self.notes = _notes(config, self, len(vision), len(mtp))

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The text network's tensors by canonical name (see `glm53serve.model.layout`)."""
        return self._tensors

    # -- weights

    def layer(self, index: int) -> LayerWeights:
        """All weights of layer `index` but its routed experts. Raises CheckpointError when a small tensor holds NaN or infinity."""
        c = self.config
        at = f"layers.{index}."
        needs = dict(layout.layer_needs(c, index, self._tensors))
        kda = c.layer_kinds[index] == KDA
        ffn: FfnWeights | MoeWeights
        if c.mlp_kinds[index] == SPARSE:
            shared = self._ffn(f"{at}mlp.shared_experts.", needs) if c.n_shared_experts else None
            router, bias = self._small(f"{at}mlp.gate.weight", needs), self._small(f"{at}mlp.gate.e_score_correction_bias", needs)
            ffn = MoeWeights(router, bias, shared)
        else:
            ffn = self._ffn(f"{at}mlp.", needs)
        return LayerWeights(
            index,
            self._small(f"{at}input_layernorm.weight", needs),
            self._small(f"{at}post_attention_layernorm.weight", needs),
            self._hyper(f"{at}hc_attn_", needs),
            self._hyper(f"{at}hc_ffn_", needs),
            self._kda(f"{at}self_attn.", needs) if kda else self._dsa(f"{at}self_attn.", needs, c.indexer_kinds[index] == FULL),
            ffn,
        )

    def embedding(self) -> Matrix:
        """The embedding table [V, H]."""
        return self.matrix(self._end("embed_tokens.weight"))

    def final_norm(self) -> F32Array:
        """Weight of the final RMS norm, float32 [H]."""
        return self._small("norm.weight", {"norm.weight": Need((self.config.hidden_size,))})

    def lm_head(self) -> Matrix:
        """The head [V, H]; the embedding table when it is tied."""
        return self.matrix(self._end("lm_head.weight")) if self.has_head else self.embedding()

    def expert(self, layer: int, expert: int) -> FfnWeights:
        """Weights of one routed expert, as stored."""
        gate, up, down = self.stored_expert(layer, expert)
        return FfnWeights(self.matrix(gate), self.matrix(up), self.matrix(down))

    # -- places

    def stored_expert(self, layer: int, expert: int) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix]:
        """Where gate, up and down of one routed expert (of the MTP block too) lie. Raises IndexError for a layer or expert that is not there."""
        c = self.config
        sparse = layer in self.mtp_layers or (0 <= layer < c.num_layers and c.mlp_kinds[layer] == SPARSE)
        if not (sparse and 0 <= expert < c.n_routed_experts):
            raise IndexError(f"no routed expert {expert} in layer {layer}")
        at, tensors, width = f"layers.{layer}.", self._tensors, c.moe_intermediate_size
        packed = at + layout.PACKED_GATE_UP
        if packed in tensors:
            gate = locate(tensors, packed, self._into_packed, expert, 0, width)
            up = locate(tensors, packed, self._into_packed, expert, width, width)
        else:
            gate = locate(tensors, f"{at}mlp.experts.{expert}.gate_proj.weight", self._into)
            up = locate(tensors, f"{at}mlp.experts.{expert}.up_proj.weight", self._into)
        packed = at + layout.PACKED_DOWN
        if packed in tensors:
            return gate, up, locate(tensors, packed, self._out_packed, expert)
        return gate, up, locate(tensors, f"{at}mlp.experts.{expert}.down_proj.weight", self._out)

    def expert_pieces(self, layer: int, expert: int) -> tuple[Piece, ...]:
        """The byte ranges of one routed expert: gate, gate.scale, up, up.scale, down, down.scale (no scales for F32 and BF16)."""
        pieces = []
        roles: tuple[Role, ...] = ("gate", "up", "down")
        for role, stored in zip(roles, self.stored_expert(layer, expert), strict=True):
            for extent, suffix in ((stored.data, ""), (stored.scale, ".scale")):
                if extent is not None:
                    path = self.files[extent.shard]
                    pieces.append(Piece(path, extent.offset, extent.nbytes, extent.dtype, extent.shape, role + suffix, stored.format, extent.tensor))
        return tuple(pieces)

    def stored_matrix(self, name: str, need: Need) -> StoredMatrix:
        """Where a matrix that is no routed expert's lies, by canonical name."""
        return locate(self._tensors, name, need)

    def dense_matrices(self) -> Iterator[tuple[str, StoredMatrix]]:
        """Canonical name and place of every matrix but the routed experts': embedding, head when not tied, then layer by layer."""
        needs = dict(layout.end_needs(self.config, self.has_head))
        for layer in range(self.config.num_layers):
            needs.update(layout.layer_needs(self.config, layer, self._tensors))
        for name, need in needs.items():
            if need.matrix:
                yield name, locate(self._tensors, name, need)

    def small_bytes(self) -> int:
        """Bytes in memory (as float32) of everything that is not a matrix: norms, router, hyper-connections, convolutions."""
        total = self.config.hidden_size
        for layer in range(self.config.num_layers):
            total += sum(int(np.prod(n.shape)) for _, n in layout.layer_needs(self.config, layer, self._tensors) if not n.matrix)
        return 4 * total

    def matrix(self, stored: StoredMatrix) -> Matrix:
        """A matrix as stored. Raises CheckpointError when the file cannot be read or mapped."""
        scale = None if stored.scale is None else self._extents.view(stored.scale)
        return Matrix(stored.format, stored.rows, stored.cols, self._extents.view(stored.data), scale)

    def close(self) -> None:
        """Forget the memory maps; each goes when the last view of it does."""
        self._extents.close()

    # -- pieces of a layer

    def _end(self, name: str) -> StoredMatrix:
        return locate(self._tensors, name, Need((self.config.vocab_size, self.config.hidden_size), True))

    def _hyper(self, at: str, needs: Mapping[str, Need]) -> HyperConnection:
        return HyperConnection(self._small(f"{at}fn", needs), self._small(f"{at}base", needs), self._small(f"{at}scale", needs))

    def _ffn(self, at: str, needs: Mapping[str, Need]) -> FfnWeights:
        gate, up, down = (self._matrix(f"{at}{name}_proj.weight", needs) for name in ("gate", "up", "down"))
        return FfnWeights(gate, up, down)

    def _kda(self, at: str, needs: Mapping[str, Need]) -> KdaWeights:
        q, k, v, f_a, f_b, g_a, g_b, beta, out = (
            self._matrix(f"{at}{name}_proj.weight", needs) for name in ("q", "k", "v", "f_a", "f_b", "g_a", "g_b", "b", "o")
        )
        width, taps = self.config.kda_width, self.config.conv_width
        if f"{at}conv1d.weight" in needs:
            fused = self._small(f"{at}conv1d.weight", needs).reshape(3, width, taps)
            convs = [np.ascontiguousarray(fused[i]) for i in range(3)]
        else:
            convs = [self._small(f"{at}{name}_conv1d.weight", needs).reshape(width, taps) for name in "qkv"]
        dt_bias, a_log, o_norm = (self._small(f"{at}{name}", needs) for name in ("dt_bias", "A_log", "o_norm.weight"))
        return KdaWeights(q, k, v, convs[0], convs[1], convs[2], f_a, f_b, dt_bias, a_log.reshape(-1), beta, g_a, g_b, o_norm, out)

    def _dsa(self, at: str, needs: Mapping[str, Need], full: bool) -> DsaWeights:
        q_a, q_b, kv_a, kv_b, out = (
            self._matrix(f"{at}{name}.weight", needs) for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        )
        q_norm, kv_norm = self._small(f"{at}q_a_layernorm.weight", needs), self._small(f"{at}kv_a_layernorm.weight", needs)
        return DsaWeights(q_a, q_norm, q_b, kv_a, kv_norm, kv_b, out, self._indexer(f"{at}indexer.", needs) if full else None)

    def _indexer(self, at: str, needs: Mapping[str, Need]) -> IndexerWeights:
        wq_b, wk, heads = (self._matrix(f"{at}{name}.weight", needs) for name in ("wq_b", "wk", "weights_proj"))
        norm, bias = self._small(f"{at}k_norm.weight", needs), self._small(f"{at}k_norm.bias", needs)
        ape, gate = self._small(f"{at}index_kpool_compress_ape", needs), self._matrix(f"{at}index_kpool_compress_gate", needs)
        return IndexerWeights(wq_b, wk, norm, bias, heads, ape, gate)

    def _matrix(self, name: str, needs: Mapping[str, Need]) -> Matrix:
        return self.matrix(locate(self._tensors, name, needs[name]))

    def _small(self, name: str, needs: Mapping[str, Need]) -> F32Array:
        return self.small(name, needs[name])

    def small(self, name: str, need: Need) -> F32Array:
        """A tensor that is not a matrix, as a float32 copy in the shape needed. Raises CheckpointError when it holds NaN or infinity."""
        info, shape = self._tensors[name], need.shape
        dtype = np.dtype(np.float32 if info.dtype == "F32" else np.uint16)
        raw = self._extents.view(Extent(info.shard, info.offset, info.nbytes, dtype, shape, info.name))
        values = np.array(raw, np.float32) if info.dtype == "F32" else bf16_to_f32(raw)
        finite = np.isfinite(values)
        if not finite.all():
            first = int(np.argmin(finite.reshape(-1)))
            raise CheckpointError(f"{info.name}: element {first} is {values.reshape(-1)[first]}, the config needs finite numbers")
        return values

    def read(self, extent: Extent) -> NDArray[Any]:
        """A run of bytes as an array in memory of its own. Raises CheckpointError."""
        return self._extents.read(extent)


def open_checkpoint(directory: Path | str, config: ModelConfig | None = None, mapped: bool = True) -> Checkpoint:
    """Open a model directory: config, index and headers are read and every tensor is checked; no weight is read.

    Raises ConfigError or CheckpointError (one line each): a damaged file; the first tensor the config has no use for and the first that is
    missing; a tensor of another dtype or shape (`<tensor>: <what is there>, the config needs <what>`).
    """
    directory = Path(directory)
    config = load_config(directory) if config is None else config
    files, found = read_directory(directory)
    tensors, vision, unknown = sort_out(found)
    head = "lm_head.weight" in tensors or not config.tie_word_embeddings
    needs = dict(layout.end_needs(config, head))
    for layer in range(config.num_layers):
        needs.update(layout.layer_needs(config, layer, tensors))
        if config.mlp_kinds[layer] == SPARSE:
            needs.update(layout.routed_needs(config, layer, tensors))
    blocks = mtp_layers(config, tensors)
    trunk = len(needs)
    for layer in blocks:
        needs.update(layout.mtp_needs(config, layer, tensors))
    check_names(tensors, needs, unknown, trunk, config.num_layers)
    for name, need in needs.items():
        tensor = tensors[name]
        if need.matrix:
            fmt = format_of(tensor)
            scale = None if fmt is None else scale_name(name, fmt)
            check_matrix(tensor, need, None if scale is None else tensors[scale])
        else:
            check_small(tensor, need)
    starts = tuple(f"layers.{layer}." for layer in blocks)
    mtp = [tensor for name, tensor in tensors.items() if starts and name.startswith(starts)]
    return Checkpoint(directory, config, files, tensors, vision, mtp, mapped)


def _notes(config: ModelConfig, checkpoint: Checkpoint, vision: int, mtp: int) -> list[str]:
    """What a user should know about tensors that are there and not used, or promised and not there."""
    notes = []
    if mtp:
        although = "" if config.num_nextn_predict_layers else ", although num_nextn_predict_layers is 0"
        notes.append(f"MTP block: {mtp} tensors, {checkpoint.mtp_bytes} bytes, not used by the text path{although}")
    elif config.num_nextn_predict_layers:
        notes.append(f"num_nextn_predict_layers is {config.num_nextn_predict_layers}, the files have no MTP block: served without drafts")
    if vision:
        notes.append(f"vision tower: {vision} tensors, {checkpoint.vision_bytes} bytes, not used by the text path")
    elif config.has_vision:
        notes.append("vision_config is there, the files have no vision tower")
    if not checkpoint.has_head:
        notes.append("lm_head is tied to the embedding")
    return notes
