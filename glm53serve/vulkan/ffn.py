"""Feed-forwards: dense, shared and routed experts, as stages of dispatches (model spec 6)."""

from __future__ import annotations

import struct

import numpy as np

from glm53serve.model.weights import ExpertSource, FfnWeights, MoeWeights
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.hyper import constant
from glm53serve.vulkan.linear import VECTOR_ROWS, Op, Stage, Target, upload, upload_experts
from glm53serve.vulkan.pack import Narrow, gate_up, pack, pack_values
from glm53serve.vulkan.scratch import Scratch, Sizes


class DenseFfn:
    """A dense feed-forward or a shared expert (model spec 6)."""

    def __init__(self, device: Device, sizes: Sizes, w: FfnWeights, narrow: Narrow) -> None:
        self.sizes = sizes
        self.gate_up = upload(device, [("gate_up", gate_up(FfnWeights(narrow(w.gate), narrow(w.up), w.down)))])
        self.down = upload(device, [("down", pack(narrow(w.down)))])

    def stages(self, s: Scratch, bucket: int) -> list[Stage]:
        """From `xn` to `y`."""
        z, width = self.sizes, self.down.cols
        return [
            self.gate_up.ops(bucket, Target(s["xn"], z.hidden), Target(s["act"], width), z.config.swiglu_limit),
            self.down.ops(bucket, Target(s["act"], width), Target(s["y"], z.hidden)),
        ]


class MoeFfn:
    """Router, routed experts and the shared expert (model spec 6), all on the device."""

    def __init__(self, device: Device, sizes: Sizes, index: int, place: int, w: MoeWeights, experts: ExpertSource, uses: Buffer, narrow: Narrow) -> None:
        c = sizes.config
        self.sizes, self.place, self.uses = sizes, place, uses
        self.router = upload(device, [("router", pack_values(np.asarray(w.router, np.float32)))], exact=True)
        self.bias = constant(device, w.bias)
        self.shared = DenseFfn(device, sizes, w.shared, narrow) if w.shared is not None else None
        fetched = (experts.expert(index, e) for e in range(c.n_routed_experts))
        self.gate_up, self.down = upload_experts(device, c.n_routed_experts, ((gate_up(f), pack(f.down)) for f in fetched))

    def stages(self, device: Device, s: Scratch, bucket: int) -> list[Stage]:
        """From `xn` to `y` (shared), `ey` and `weights` (routed)."""
        c, z, k = self.sizes.config, self.sizes, self.sizes.config.num_experts_per_tok
        per_thread = _expert_tile(bucket * k / c.n_routed_experts)
        tile = 16 * per_thread
        most = -(-bucket * k // tile) + min(c.n_routed_experts, bucket * k)
        tiles = (s["tiles"], s["order"], per_thread, most)
        xn, limit = Target(s["xn"], z.hidden), c.swiglu_limit
        first = self.router.ops(bucket, xn, Target(s["logits"], z.experts))
        second: Stage = [self._route(s, bucket)]
        if self.shared is not None:
            gate_up_stage, down_stage = self.shared.stages(s, bucket)
            first, second = first + gate_up_stage, second + down_stage
        stages = [first, second]
        if bucket > VECTOR_ROWS:
            sort = Op("moe_sort", {2: c.n_routed_experts, 3: tile}, [s["ids"], s["tiles"], s["order"]], struct.pack("I", k), (1, 1, 1))
            stages.append([sort])
        act = Target(s["eact"], z.expert_width)
        stages.append(self.gate_up.ops(bucket, k, xn, act, k, s["ids"], tiles, limit))
        stages.append(self.down.ops(bucket, k, act, Target(s["ey"], z.hidden), 1, s["ids"], tiles, None))
        return stages

    def _route(self, s: Scratch, bucket: int) -> Op:
        c, z = self.sizes.config, self.sizes
        sparse = self.uses.nbytes // 4 // z.slots // c.n_routed_experts
        push = struct.pack(
            "6If",
            z.experts,
            c.num_experts_per_tok,
            c.topk_group,
            c.norm_topk_prob,
            sparse * c.n_routed_experts,
            self.place * c.n_routed_experts,
            c.routed_scaling_factor,
        )
        buffers = [s["logits"], self.bias, s["ids"], s["weights"], self.uses]
        return Op("route", {2: c.n_routed_experts, 3: c.n_group}, buffers, push, (bucket, 1, 1), 4.0 * bucket * c.n_routed_experts**2)


def _expert_tile(rows_an_expert: float) -> int:
    return 1 if rows_an_expert <= 16 else 2 if rows_an_expert <= 32 else 4
