"""The CUDA backend on this machine's GPU: `make bench-cuda`. Every figure is printed with the machine's own rates of the same run.

    python -m bench.cuda [--sections rates,decode,...] [--layers 8] [--experts 288] [--context 4096]
"""

from __future__ import annotations

import argparse
import threading
import time

import numpy as np

from bench.cuda_measure import BenchDevice, Stopwatch, cost_table, percentiles, table
from bench.cuda_random import RandomModel, matrices_of, stored_bytes
from glm53serve.cuda.decode import Decoder, decode_loop
from glm53serve.cuda.layers import CudaHead, CudaLayers, make_head
from glm53serve.cuda.model import DeviceModel, KdaOnDevice, MoeOnDevice, defines, flops_per_row
from glm53serve.engine.seam import Batch, Halted, Span, never
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


def bench_decode(bed: Bed, context: int) -> None:
    """Decode of one stream and of several, against what the bytes allow."""
    full = 45 / bed.config.num_layers
    for slots in (1, 2, 4, 8, 16):
        if slots > bed.layers.slots:
            break
        for slot in range(slots):
            bed.prefill(slot, context if slot == 0 or context <= 512 else 512, seed=slot)
        position = context if slots == 1 else min(context, 512)
        distinct = bed.distinct_experts(slots, position)
        bed.decode(slots, 16, position + 1)
        wall = bed.decode(slots, 100, position + 20)
        gap, step = bed.gaps(100)
        parts = bed.step_bytes(slots, distinct, position + 60)
        total = sum(parts.values())
        bound = total / bed.copy / 1e9
        say(
            f"decode, {slots} streams at position {position}: step {np.median(step):.0f} us (wall {wall * 1e6:.0f}), {total / 1e9:.3f} GB a step = "
            f"{total / np.median(step) / 1e3:.0f} GB/s = {100 * bound * 1e6 / np.median(step):.1f} % of copy; "
            f"{slots / wall:.1f} tok/s here; gap {percentiles(gap)} us; distinct experts a layer {distinct / max(1, len(bed.config.sparse_layers)):.1f}"
        )
        if slots == 1:
            say("  bytes:", ", ".join(f"{name} {value / 1e6:.1f} MB" for name, value in parts.items()))
            head = stored_bytes(bed.model.head) if bed.model.head else 0
            rest = np.median(step) - head / bed.copy / 1e3
            say(f"  extrapolated (not measured) to 45 layers: {1e6 / (rest * full + head / bed.copy / 1e3):.0f} tok/s")
    for slots in (1, 8):
        if slots <= bed.layers.slots:
            position = context if slots == 1 else min(context, 512)
            step_costs(bed, slots, position)


def step_costs(bed: Bed, slots: int, position: int) -> None:
    """Where the time of a decode step goes. The commit is left out of the graphs, so every step is the same; what a kernel left out changes does not route."""
    bed.decoder.upload(slots, [(RowPlan(slot, 17 + slot, position + 200, 100, 100, seed=slot), 1 + slot) for slot in range(slots)])
    bed.decoder._step(slots)
    device, launch = bed.device, bed.device.launch

    def step() -> None:
        bed.decoder._step(slots)

    device.launch = lambda kernel, *rest: None if kernel == "commit" else launch(kernel, *rest)  # type: ignore[method-assign]
    try:
        whole, costs = device.costs(step, frozenset({"route_few"}))
    finally:
        device.launch = launch  # type: ignore[method-assign]
    cost_table(f"decode, {slots} streams", whole, costs, bed.copy)


def bench_prefill(bed: Bed, rows: int) -> None:
    """A chunk of `rows` tokens against the machine's GEMM rate."""
    bed.prefill(0, rows)
    seconds = min(bed.prefill(0, rows, seed) for seed in range(2))
    c = bed.config
    flops = 0
    for layer in bed.model.layers:
        part = layer.ffn
        if isinstance(part, MoeOnDevice):
            flops += c.num_experts_per_tok * (flops_per_row(part.gate_up, pair=True) + flops_per_row(part.down)) + flops_per_row(part.router)
            if part.shared:
                flops += flops_per_row(part.shared.gate_up, pair=True) + flops_per_row(part.shared.down)
        else:
            flops += flops_per_row(part.gate_up, pair=True) + flops_per_row(part.down)
        names = [value for name in layer.attention.__slots__ for value in (lambda v: v if isinstance(v, tuple) else (v,))(getattr(layer.attention, name))]
        flops += sum(flops_per_row(m) for m in names if hasattr(m, "granules"))
        if getattr(layer.attention, "indexer", None):
            flops += sum(flops_per_row(getattr(layer.attention.indexer, n)) for n in ("query", "key", "gate", "weights"))
        if isinstance(layer.attention, KdaOnDevice):
            flops += 7 * c.kda_heads * c.kda_head_dim**2
        else:
            mean = np.minimum(np.arange(rows) + 1, c.index_topk + 1).mean()
            flops += int(4 * mean * c.num_heads * c.kv_lora_rank)
    rate = flops * rows / seconds / 1e12
    say(
        f"prefill, {rows} tokens: {seconds * 1e3:.1f} ms = {rows / seconds:.0f} tok/s over {c.num_layers} layers, {rate:.0f} TFLOP/s useful = "
        f"{100 * rate / bed.gemm:.1f} % of the GEMM rate"
    )
    ids = np.random.default_rng(0).integers(0, c.vocab_size, rows)
    bed.layers.reset_slot(0)

    def go() -> None:
        arrays = bed.layers.tables.fill([Span(0, 0, rows)], ids)
        bed.layers.pipeline.embed(rows, bed.layers.tables.ids)
        bed.layers.pipeline.zero_counts()
        bed.layers.pipeline.layers(rows, arrays, 1)

    table("one chunk, kernel by kernel", bed.device.profile(go))


def bench_check(bed: Bed) -> None:
    """The last logits after a prompt of 256 tokens: all rows at once (bf16) against 16 at a time (bf16 pairs)."""
    ids = np.random.default_rng(5).integers(0, bed.config.vocab_size, 256)
    results = []
    for size in (256, 16):
        bed.layers.reset_slot(0)
        for start in range(0, 256, size):
            bed.layers.forward_ids(ids[start : start + size], Batch((Span(0, start, size),)), never)
        results.append(bed.head.device_logits(1, size - 1)[0])
    error = np.abs(results[0] - results[1]).max() / np.abs(results[1]).max()
    say(f"last row's logits after 256 tokens, one bf16 chunk against chunks of 16 on bf16 pairs: largest difference / largest logit {error:.2e}")


def bench_gaps(bed: Bed, position: int, name: str) -> None:
    """Device idle between steps under host load."""
    import sys

    sys.setswitchinterval(1e-4)
    for label, depth, loop, work, threads in (
        ("plain loop (depth 0)", 0, 0, 0.0, 0), ("depth 1", 1, 0, 0.0, 0), ("depth 1, 300 us of Python a step", 1, 0, 300.0, 0),
        ("depth 1, one busy thread", 1, 0, 0.0, 1), ("adaptive depth, 300 us of Python a step", None, 0, 300.0, 0), ("device loop of 64", 1, 64, 0.0, 0),
    ):  # fmt: skip
        stop = threading.Event()

        def spin(stop: threading.Event = stop) -> None:
            count = 0
            while not stop.is_set():
                count += 1

        helpers = [threading.Thread(target=spin, daemon=True) for _ in range(threads)]
        for helper in helpers:
            helper.start()
        bed.decode(1, 20, position, depth, loop)
        wall = bed.decode(1, 300, position + 20, depth, loop, work)
        stop.set()
        gap, step = bed.gaps(300)
        say(f"gap, {name}, {label}: {percentiles(gap)} us; step {np.median(step):.1f} us, wall {wall * 1e6:.1f}")


def bench_cancel(bed: Bed, rows: int) -> None:
    """How long a cancel inside a prompt chunk takes, the device idle and the state restored."""
    ids = np.random.default_rng(0).integers(0, bed.config.vocab_size, rows)
    rng = np.random.default_rng(1)
    whole = bed.prefill(0, rows)
    took = []
    for _ in range(20):
        bed.layers.reset_slot(0)
        bed.layers.snapshot(0)
        bed.device.synchronize()
        flag = threading.Event()
        when = [0.0]

        def fire(flag: threading.Event = flag, when: list[float] = when) -> None:
            when[0] = time.perf_counter()
            flag.set()

        timer = threading.Timer(float(rng.uniform(0.0, whole * 0.9)), fire)
        timer.start()
        try:
            bed.layers.forward_ids(ids, Batch((Span(0, 0, rows),)), flag.is_set)
        except Halted:
            bed.layers.restore(0)
            took.append(1e3 * (time.perf_counter() - when[0]))
        timer.join()
    say(f"cancel inside a chunk of {rows}: {len(took)} hits, ms: {percentiles(np.array(took))}")


def bench_decode_cancel(bed: Bed, position: int) -> None:
    """From a cancel in decode to its commit, in steps and milliseconds."""
    rng = np.random.default_rng(2)
    step = bed.decode(1, 50, position)
    took, after = [], []
    for trial in range(50):
        session = decode_loop(bed.decoder, 1)
        session.start(RowPlan(0, 17, position + trial, 500, 500))
        for _ in range(int(rng.integers(3, 12))):
            session.turn()
        time.sleep(float(rng.uniform(0, step)))
        head, start = bed.decoder.committed(), time.perf_counter()
        session.cancel(0)
        while session.live_slots:
            session.turn()
        took.append(1e3 * (time.perf_counter() - start))
        after.append(session.harvested - head)
        session.drain()
    say(f"cancel in decode: ms {percentiles(np.array(took))}, step {step * 1e3:.2f} ms, steps until its commit, that one included: at most {max(after)}")


def bench_nano() -> None:
    """The shipped model: decode and gaps."""
    from glm53serve.cuda.backend import load_backend
    from glm53serve.load import shipped_model
    from glm53serve.model.checkpoint import open_checkpoint

    backend = load_backend(open_checkpoint(shipped_model()), 16, 4096, 512, make_device=BenchDevice, looping=True, note=say)
    bed = Bed.__new__(Bed)
    bed.config, bed.device = backend.layers.config, backend.device  # type: ignore[assignment]
    bed.layers, bed.head, bed.decoder = backend.layers, backend.head, backend.decoder
    for slots in (1, 16):
        for slot in range(slots):
            bed.prefill(slot, 64, slot)
        wall = bed.decode(slots, 500, 64)
        _, step = bed.gaps(400)
        say(f"shipped model, {slots} streams: step {np.median(step):.1f} us, {slots / wall:.0f} tok/s")
    bench_gaps(bed, 64, "shipped model")
    backend.device.close()


def bench_host_experts(layers: int, share: float, router_bias: float) -> None:
    """A model with a share of its experts, drawn at random, in pinned host memory: the same tokens, and the step against two bounds.

    The smaller `router_bias`, the more experts the tokens use in turn; at 0 a layer misses `share` of those it asks for.
    """
    tokens, here = [], 0.0
    for part in (0.0, share):
        bed = Bed(flash(layers, 96), "int8", "int4", 2, 2048, 512, host_share=part, loops=False, router_bias=router_bias)
        bed.prefill(0, 256)
        session = decode_loop(bed.decoder, 1)
        session.start(RowPlan(0, 17, 256, 300, 300))
        out = []
        while session.live_slots or session.outstanding:
            out += [c.token for c in session.turn()]
        tokens.append(out)
        bed.layers.clear_uses(0)
        bed.decode(1, 200, 600)
        uses, times = bed.layers.expert_uses(0), bed.gaps(190)[1]
        missed = float(uses[bed.layers.tiers() == 1].sum()) / 200
        expert = next(layer.ffn.expert_bytes for layer in bed.model.layers if isinstance(layer.ffn, MoeOnDevice))
        total = sum(bed.step_bytes(1, round(uses.sum() / 200), 600).values())
        mean, transfer = float(np.mean(times)), missed * expert / 50e3
        here = here or mean
        by_copy, by_step = max((total - missed * expert) / bed.copy / 1e3, transfer), max(here, transfer)
        line = (
            f"{layers} layers, 96 experts, router bias {router_bias}, {100 * part:.0f} % of the experts on the host: step median {np.median(times):.0f} us, "
            f"mean {mean:.0f} us, {missed / len(bed.config.sparse_layers):.2f} experts missed a layer = {transfer:.0f} us at 50 GB/s; of the bound by copy "
            f"({by_copy:.0f} us) {100 * by_copy / mean:.0f} %, of the bound by the step all on the device ({by_step:.0f} us) {100 * by_step / mean:.0f} %"
        )
        if missed:
            line += f"; {missed * expert / max(mean - here, 1e-9) / 1e3:.0f} GB/s if the misses are all the difference"
        say(line)
        bed.close()
    say("tokens with experts on the host equal those without:", tokens[0] == tokens[1], len(tokens[0]))


def bench_peers(layers: int, experts: int) -> None:
    """transformers on the same GPU and shape, bf16; it runs first, in its own process."""
    import json
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-m", "bench.cuda_peers", str(layers), str(experts)], capture_output=True, text=True, check=False, timeout=240)
    if done.returncode:
        say("transformers did not run:", done.stderr[-1500:])
        return
    theirs = json.loads(done.stdout.splitlines()[-1])
    bed = Bed(flash(layers, experts), "bf16", "bf16", 1, 5120, 4096, loops=False)
    bed.prefill(0, 4096)
    ours = min(bed.prefill(0, 4096) for _ in range(2))
    bed.decode(1, 20, 4096)
    step = bed.decode(1, 100, 4120)
    say(
        f"{layers} layers, {experts} experts, bf16, at depth 4,096: transformers prefill {4096 / theirs['prefill']:.0f} tok/s, "
        f"decode {1 / theirs['step']:.1f} tok/s; "
        f"here {4096 / ours:.0f} and {1 / step:.0f}: {theirs['prefill'] / ours:.1f} x and {theirs['step'] / step:.0f} x"
    )
    bed.close()


BED_SECTIONS = ("decode", "prefill", "check", "gaps", "cancel")


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sections", default="decode,check,prefill,gaps,cancel,deep,nano,host,peers")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=288)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--dense", default="int8")
    parser.add_argument("--expert", default="int4")
    parser.add_argument("--router-bias", type=float, default=0.05, help="spread of the random router's bias")
    options = parser.parse_args()
    sections = options.sections.split(",")
    if set(sections) & set(BED_SECTIONS):
        config, capacity = flash(options.layers, options.experts), options.context + 1024
        bed = Bed(config, options.dense, options.expert, options.slots, capacity, options.rows, router_bias=options.router_bias)
        for section in sections:
            if section == "decode":
                bench_decode(bed, options.context)
            elif section == "prefill":
                bench_prefill(bed, options.rows)
            elif section == "check":
                bench_check(bed)
            elif section == "gaps":
                bench_gaps(bed, 64, "real width")
            elif section == "cancel":
                bench_cancel(bed, options.rows)
                bench_decode_cancel(bed, 64)
        bed.close()
    if "deep" in sections:
        bed = Bed(flash(32, 288), options.dense, options.expert, 8, 5120, 4096, loops=False)
        bench_decode(bed, 4096)
        bench_prefill(bed, 4096)
        bed.close()
    if "nano" in sections:
        bench_nano()
    if "host" in sections:
        for bias in (0.05, 0.0):
            bench_host_experts(6, 0.1, bias)
    if "peers" in sections:
        bench_peers(8, 64)


if __name__ == "__main__":
    main()
