"""What the sections of `bench.cuda` run on: a random model of the real widths on this machine's GPU, and the log."""

from __future__ import annotations

import time

import numpy as np

from bench.cuda_measure import BenchDevice, Stopwatch
from bench.cuda_random import RandomModel, matrices_of, stored_bytes
from glm53serve.cuda.decode import Decoder, decode_loop
from glm53serve.cuda.layers import CudaHead, CudaLayers, make_head
from glm53serve.cuda.model import DeviceModel, KdaOnDevice, MoeOnDevice, defines
from glm53serve.engine.seam import Batch, Span, never
from glm53serve.engine.step_device import RowPlan
from glm53serve.model.config import ModelConfig
from glm53serve.model.config_file import parse_config
from glm53serve.model.shapes import shape_config

WATCH = Stopwatch()
say = WATCH.say


def flash(layers: int, experts: int) -> ModelConfig:
    """The real widths with fewer layers (and experts)."""
    return parse_config(shape_config("flash", layers, experts, fp8=False))


class Bed:
    """A random model with its decoders, and the rates of the machine."""

    def __init__(
        self,
        config: ModelConfig,
        dense: str,
        expert: str,
        slots: int,
        capacity: int,
        chunk: int,
        host_share: float = 0.0,
        loops: bool = True,
        router_bias: float = 0.05,
    ) -> None:
        start = time.perf_counter()
        self.config = config
        self.device = BenchDevice(defines(config, {dense, expert, "bf16"}))
        say(f"{self.device.name}: kernels compiled or read from the cache in {time.perf_counter() - start:.1f} s")
        self.copy, self.gemm = self.device.copy_bandwidth(), self.device.gemm_rate()
        say(f"copy {self.copy:.0f} GB/s (read + written), bf16 product {self.gemm:.0f} TFLOP/s")
        start = time.perf_counter()
        self.model: DeviceModel = RandomModel(self.device, config, dense, expert, router_bias=router_bias).build(host_share)  # type: ignore[arg-type]
        self.layers = CudaLayers(self.device, self.model, slots, capacity, chunk, exact=False)
        for slot in range(slots):
            self.layers.open_slot(slot, capacity)
        self.head: CudaHead = make_head(self.layers)
        self.layers.warm_up()
        self.device.synchronize()
        say(f"{config.num_layers} layers, {config.n_routed_experts} experts, dense {dense}, experts {expert}: drawn in {time.perf_counter() - start:.1f} s")
        start = time.perf_counter()
        self.decoder: Decoder = Decoder(self.layers, say, loops=loops)
        took = time.perf_counter() - start
        say(f"decode graphs in {took:.1f} s, captured: {self.decoder.captured}; {self.device.free_bytes() / 1e9:.1f} GB of the device free")

    def prefill(self, slot: int, tokens: int, seed: int = 0) -> float:
        """Seconds of one prompt of `tokens` tokens in an empty slot."""
        ids = np.random.default_rng(seed).integers(0, self.config.vocab_size, tokens)
        self.layers.reset_slot(slot)
        self.device.synchronize()
        start = time.perf_counter()
        self.layers.forward_ids(ids, Batch((Span(slot, 0, tokens),)), never)
        self.device.synchronize()
        return time.perf_counter() - start

    def decode(self, slots: int, steps: int, position: int, depth: int | None = 1, loop: int = 0, work_us: float = 0.0) -> float:
        """Seconds a step of `slots` rows, wall clock over `steps` steps."""
        session = decode_loop(self.decoder, depth, loop)
        for slot in range(slots):
            session.start(RowPlan(slot, 17 + slot, position, steps, steps + 1, seed=slot))
        start = time.perf_counter()
        while session.live_slots or session.outstanding:
            session.turn()
            if work_us:
                until = time.perf_counter() + work_us * 1e-6
                while time.perf_counter() < until:
                    pass
        return (time.perf_counter() - start) / steps

    def gaps(self, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Device idle before each of the last steps, and how long each step took, us."""
        clocks = self.decoder.clocks()[-last:].astype(np.int64)
        return (clocks[1:, 0] - clocks[:-1, 1])[5:] / 1e3, (clocks[:, 1] - clocks[:, 0])[5:] / 1e3

    def step_bytes(self, slots: int, distinct: int, position: int) -> dict[str, float]:
        """Bytes a decode step of `slots` rows must touch: weights, experts (`distinct` over all layers), state read and written."""
        c, model = self.config, self.model
        kda = sum(isinstance(layer.attention, KdaOnDevice) for layer in model.layers)
        dsa = len(model.layers) - kda
        expert = next((layer.ffn.expert_bytes for layer in model.layers if isinstance(layer.ffn, MoeOnDevice)), 0)
        n, h = c.hc_mult, c.hidden_size
        attended = min(position + 1, c.index_topk + c.index_kpool - 1)
        scored = position // c.index_kpool if position >= c.index_topk + c.index_kpool else 0
        return {
            "dense": sum(stored_bytes(m) for _, m in matrices_of(model)),
            "mhc": len(model.layers) * 2 * 4 * (2 + n) * n * n * h,
            "experts": distinct * expert,
            "kda state": slots * kda * 4 * (2 * c.kda_heads * c.kda_head_dim**2 + 2 * (c.conv_width - 1) * 3 * c.kda_width),
            "latents": slots * dsa * 4 * (attended * c.kv_lora_rank + scored * c.index_head_dim),
        }

    def distinct_experts(self, slots: int, position: int) -> int:
        """Distinct experts a step of these rows used, summed over layers."""
        for slot in range(slots):
            self.layers.clear_uses(slot)
        self.decode(slots, 1, position)
        return int((sum(self.layers.expert_uses(slot) for slot in range(slots)) > 0).sum())

    def close(self) -> None:
        """Free the device."""
        self.decoder._graphs.clear()
        self.decoder._loops.clear()
        self.device.close()
