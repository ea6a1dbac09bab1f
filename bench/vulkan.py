"""Measures the Vulkan chain on this machine's device: `python bench/vulkan.py --shape flash --layers 8 [--rows 128] [--cpu]`.

The model is random and lives in memory only (one pool of random values, cut into every matrix; eight different experts stand for all),
which changes no time: a step reads the same number of bytes. Prints one line a figure and, with --json, writes them to a file.
"""

from __future__ import annotations

import json
import statistics
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.engine.seam import Batch, Halted, Span, never
from glm53serve.model.config import KDA, SPARSE, ModelConfig
from glm53serve.model.config_file import parse_config
from glm53serve.model.shapes import SHAPES, shape_config
from glm53serve.model.weights import (
    DsaWeights,
    FfnWeights,
    HyperConnection,
    IndexerWeights,
    KdaWeights,
    LayerWeights,
    Matrix,
    MatrixFormat,
    MoeWeights,
)
from glm53serve.vulkan.commands import Commands
from glm53serve.vulkan.device import Device
from glm53serve.vulkan.errors import VulkanUnavailable
from glm53serve.vulkan.ffn import MoeFfn
from glm53serve.vulkan.layers import VulkanLayers
from glm53serve.vulkan.queue import Queue

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not this folder: `import vulkan` must not find this file

from bench.options import Parser, whole  # noqa: E402

POOL = 1 << 26


class RandomModel:
    """Weights of any shape from one pool of random bytes; routed experts int4, everything else BF16."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.rng = np.random.default_rng(0)
        signs = self.rng.integers(0, 2, POOL, dtype=np.uint16) << 15
        self.bf16 = signs | self.rng.integers(0x3F00, 0x3F80, POOL, dtype=np.uint16)
        self.at = 0
        self.experts = [self.ffn(config.moe_intermediate_size, "int4") for _ in range(8)]

    def small(self, *shape: int, centre: float = 0.0, spread: float = 0.1) -> NDArray[np.float32]:
        return (centre + spread * self.rng.standard_normal(shape)).astype(np.float32)

    def matrix(self, rows: int, cols: int, kind: MatrixFormat = "bf16") -> Matrix:
        """Values of about 0.75 times a power of two near cols^-1/2."""
        if kind == "int4":
            data = self.rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
            return Matrix("int4", rows, cols, data, np.full((rows, cols // 64), 0.2 * cols**-0.5, np.float32))
        shift = round(-np.log2(cols**-0.5))
        self.at = (self.at + 7919) % 1024
        return Matrix("bf16", rows, cols, (np.resize(self.bf16[self.at :], rows * cols) - np.uint16(shift << 7)).reshape(rows, cols))

    def hyper(self) -> HyperConnection:
        n, h = self.config.hc_mult, self.config.hidden_size
        return HyperConnection(self.small((2 + n) * n, n * h, spread=(n * h) ** -0.5), self.small((2 + n) * n), self.small(3, centre=1.0))

    def ffn(self, width: int, kind: MatrixFormat = "bf16") -> FfnWeights:
        h = self.config.hidden_size
        return FfnWeights(self.matrix(width, h, kind), self.matrix(width, h, kind), self.matrix(h, width, kind))

    def attention(self, index: int) -> KdaWeights | DsaWeights:
        c = self.config
        h, p, d, di = c.hidden_size, c.kda_width, c.kda_head_dim, c.index_head_dim
        if c.layer_kinds[index] == KDA:
            return KdaWeights(
                self.matrix(p, h),
                self.matrix(p, h),
                self.matrix(p, h),
                self.small(p, c.conv_width, spread=0.5),
                self.small(p, c.conv_width, spread=0.5),
                self.small(p, c.conv_width, spread=0.5),
                self.matrix(d, h),
                self.matrix(p, d),
                self.small(p, centre=-1.0),
                self.small(c.kda_heads),
                self.matrix(c.kda_heads, h),
                self.matrix(d, h),
                self.matrix(p, d),
                self.small(d, centre=1.0),
                self.matrix(h, p),
            )
        indexer = IndexerWeights(
            self.matrix(c.index_n_heads * di, c.q_lora_rank),
            self.matrix(di, h),
            self.small(di, centre=1.0),
            self.small(di),
            self.matrix(c.index_n_heads, h),
            self.small(c.index_kpool, di),
            self.matrix(di, h),
        )
        return DsaWeights(
            self.matrix(c.q_lora_rank, h),
            self.small(c.q_lora_rank, centre=1.0),
            self.matrix(c.num_heads * c.qk_head_dim, c.q_lora_rank),
            self.matrix(c.kv_lora_rank, h),
            self.small(c.kv_lora_rank, centre=1.0),
            self.matrix(c.num_heads * (c.qk_head_dim + c.v_head_dim), c.kv_lora_rank),
            self.matrix(h, c.num_heads * c.v_head_dim),
            indexer,
        )

    def layer(self, index: int) -> LayerWeights:
        c = self.config
        h = c.hidden_size
        ffn: FfnWeights | MoeWeights = self.ffn(c.intermediate_size)
        if c.mlp_kinds[index] == SPARSE:
            router = self.small(c.n_routed_experts, h, spread=h**-0.5)
            ffn = MoeWeights(router, self.small(c.n_routed_experts), self.ffn(c.n_shared_experts * c.moe_intermediate_size))
        return LayerWeights(index, self.small(h, centre=1.0), self.small(h, centre=1.0), self.hyper(), self.hyper(), self.attention(index), ffn)

    def expert(self, layer: int, expert: int) -> FfnWeights:
        return self.experts[(layer + expert) % len(self.experts)]


def step_bytes(layers: VulkanLayers, depth: int) -> int:
    """Bytes that one decoded row must move: weights once, k experts of each sparse layer, KDA state read and written, the attended latents."""
    c, total = layers.config, 0
    for layer in layers._chain:
        attention, ffn = layer.attention, layer.ffn
        total += layer.hc_attn.fn.nbytes + layer.hc_ffn.fn.nbytes
        total += sum(getattr(attention, name).nbytes for name in ("inputs", "queries", "absorb", "expand", "f_b", "g_b", "o_proj") if hasattr(attention, name))
        if c.layer_kinds[layer.index] == KDA:
            total += 8 * c.kda_heads * c.kda_head_dim**2
        else:
            total += 4 * c.kv_lora_rank * min(depth, c.index_topk) + 4 * c.index_head_dim * (depth // c.index_kpool)
        dense = ffn.shared if isinstance(ffn, MoeFfn) else ffn
        if dense is not None:
            total += dense.gate_up.nbytes + dense.down.nbytes
        if isinstance(ffn, MoeFfn):
            arenas = ffn.gate_up.arenas + ffn.down.arenas
            held = sum(a.weights.nbytes + (a.scales.nbytes if a.scales else 0) for a in arenas)
            total += ffn.router.nbytes + held * c.num_experts_per_tok // c.n_routed_experts
    return total


def copy_bandwidth(device: Device, nbytes: int) -> float:
    """Bytes a second, read and written, of the copy kernel over ranges of `nbytes`."""
    source, target, halt = device.local(nbytes), device.local(nbytes), device.host(64)
    device.zero([source, target])
    commands, queue = Commands(device), Queue(device)
    commands.begin(device.bind([halt, device.dummy], device.common_layout))
    for _ in range(20):
        push, groups = struct.pack("I", nbytes // 16), (min(8192, nbytes // 4096), 1, 1)
        commands.dispatch(device.pipeline("copy"), device.bind([source, target]), push, groups)
        commands.kernel_barrier()
    commands.end()
    best = 0.0
    for _ in range(4):
        began = time.perf_counter()
        queue.wait(queue.submit([commands]))
        best = max(best, 40 * nbytes / (time.perf_counter() - began))
    return best


def profile(layers: VulkanLayers, key: tuple[int, int], repeats: int = 20) -> None:
    """Time of every stage of one layer of each kind, each repeated in a command buffer of its own."""
    device, shown = layers.device, set[tuple[str, str]]()
    for layer in layers._chain:
        kind = (type(layer.attention).__name__, type(layer.ffn).__name__)
        if kind in shown:
            continue
        shown.add(kind)
        total = 0.0
        for stage in layer.stages(device, layers._scratch, *key):
            commands = Commands(device)
            commands.begin(layers._common)
            for _ in range(repeats):
                for op in stage:
                    commands.dispatch(device.pipeline(op.module, op.constants), device.bind(op.buffers), op.push, op.groups)
                commands.kernel_barrier()
            commands.end()
            number = layers._queue.submit([commands])
            layers._queue.wait(number)
            began = time.perf_counter()
            layers._queue.wait(layers._queue.submit([commands]))
            took = (time.perf_counter() - began - 5e-5) / repeats
            total += took
            flops, nbytes = sum(op.flops for op in stage), sum(op.nbytes for op in stage)
            names = " ".join(dict.fromkeys(op.module for op in stage))
            print(f"  {took * 1e6:9.1f} us {flops / took / 1e12:8.2f} TFLOP/s {nbytes / took / 1e9:8.0f} GB/s  {names} {[op.groups for op in stage]}")
            commands.free()
        print(f"  {total * 1e6:9.1f} us  {' + '.join(kind)}, {key[0]} rows", flush=True)


def measure(device: Device, config: ModelConfig, rows: int, chunk: int, depth: int, steps: int, cancels: int, profiled: bool) -> dict[str, Any]:
    """Every figure for one row-group size."""
    rng, model, found = np.random.default_rng(1), RandomModel(config), dict[str, Any]()
    began = time.perf_counter()
    slots = 8
    layers = VulkanLayers(device, config, range(config.num_layers), model.layer, model, slots, depth + chunk + steps + 64, rows=rows)
    found |= {"device": device.info.name, "layers": config.num_layers, "rows": rows, "load s": time.perf_counter() - began}
    found["matrix units"] = device.matrix_units
    found["device GB"] = device.allocated / 1e9

    def streams(count: int) -> NDArray[np.float32]:
        one = rng.standard_normal((count, 1, config.hidden_size)).astype(np.float32)
        return np.repeat(one, config.hc_mult, axis=1)

    rows_of_chunk = streams(chunk)
    for _ in range(5):
        layers.reset_slot(0)
        began = time.perf_counter()
        layers.forward(rows_of_chunk, Batch((Span(0, 0, chunk),)), never)
        took = time.perf_counter() - began
    found["prefill ms"], found["prefill tok/s"] = took * 1e3, chunk / took
    seen = [s for values in layers.observed.values() for s in values]
    found["segments"], found["ms a segment: median"], found["ms a segment: largest"] = len(seen), statistics.median(seen) * 1e3, max(seen) * 1e3

    if profiled:
        for key in sorted(layers.observed):
            profile(layers, key)

    at = chunk
    for count in (1, slots):
        for slot in range(1, count):
            layers.reset_slot(slot)
        row, times, host = streams(count), list[float](), list[float]()
        for step in range(steps + 10):
            batch = Batch(tuple(Span(slot, (at if slot == 0 else 0) + step, 1) for slot in range(count)))
            began, cpu = time.perf_counter(), time.thread_time()
            layers.forward(row, batch, never)
            times.append(time.perf_counter() - began)
            host.append(time.thread_time() - cpu)
        at += steps + 10
        times, host = times[10:], host[10:]
        name = "decode" if count == 1 else f"decode of {count} rows"
        found[f"{name} ms"], found[f"{name} tok/s"] = statistics.median(times) * 1e3, count / statistics.median(times)
        found[f"{name} host ms"] = statistics.median(host) * 1e3
        if count == 1:
            needed = step_bytes(layers, at)
            if profiled:
                profile(layers, (1, 1))
            found["bytes a step, GB"], found["decode GB/s"] = needed / 1e9, needed / statistics.median(times) / 1e9

    layers.reset_slot(0)
    layers.forward(streams(min(chunk, 64)), Batch((Span(0, 0, min(chunk, 64)),)), never)
    layers.snapshot(0)
    drains = []
    for _ in range(cancels):
        flag = threading.Event()
        said = [0.0]

        def cancel(after: float, flag: threading.Event = flag, said: list[float] = said) -> None:
            time.sleep(after)
            said[0] = time.perf_counter()
            flag.set()
            layers.interrupt()

        thread = threading.Thread(target=cancel, args=(float(rng.uniform(0.05, 0.9)) * took,))
        thread.start()
        try:
            layers.forward(rows_of_chunk[: chunk - 64], Batch((Span(0, 64, chunk - 64),)), flag.is_set)
        except Halted:
            drains.append(time.perf_counter() - said[0])
        thread.join()
        layers.restore(0)
    if drains:
        found["cancels"] = len(drains)
        found["cancel to idle ms: median"], found["cancel to idle ms: largest"] = statistics.median(drains) * 1e3, max(drains) * 1e3
    layers.close()
    return found


def main() -> int:
    """Command line."""
    parser = Parser(__doc__)
    parser.add_argument("--shape", default="flash", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=whole(1, 4096), default=8)
    parser.add_argument("--rows", type=whole(1, 4096), nargs="+", default=[128], help="row-group sizes to measure")
    parser.add_argument("--chunk", type=whole(65), default=4096)
    parser.add_argument("--steps", type=whole(1), default=50)
    parser.add_argument("--cancels", type=whole(0), default=20)
    parser.add_argument("--device", default="")
    parser.add_argument("--cpu", action="store_true", help="allow a software driver")
    parser.add_argument("--no-units", action="store_true", help="do without matrix units")
    parser.add_argument("--profile", action="store_true", help="time every stage of a layer")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    config = parse_config(shape_config(args.shape, args.layers))
    results = []
    for rows in args.rows:
        try:
            device = Device(args.device, allow_cpu=args.cpu, matrix_units=not args.no_units)
        except VulkanUnavailable as unavailable:
            print(unavailable.reason, file=sys.stderr)
            return 1
        copy = copy_bandwidth(device, 1 << 30 if device.info.kind == "discrete" else 1 << 24)
        found = measure(device, config, rows, args.chunk, 64, args.steps, args.cancels, args.profile)
        found["copy GB/s"] = copy / 1e9
        found["decode share of copy"] = found["decode GB/s"] * 1e9 / copy
        for name, value in found.items():
            print(f"{name:32s} {value:.3f}" if isinstance(value, float) else f"{name:32s} {value}", flush=True)
        print(flush=True)
        results.append(found)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
