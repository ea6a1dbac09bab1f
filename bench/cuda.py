"""The CUDA backend on this machine's GPU: `make bench-cuda`. Every figure is printed with the machine's own rates of the same run.

    python -m bench.cuda [--sections decode,prefill,...] [--layers 8] [--experts 288] [--context 4096]
"""

from __future__ import annotations

import argparse

from bench.cuda_bed import Bed, flash
from bench.cuda_cancel import bench_cancel, bench_decode_cancel
from bench.cuda_decode import bench_decode, bench_gaps
from bench.cuda_models import bench_host_experts, bench_nano, bench_peers
from bench.cuda_prefill import bench_check, bench_prefill

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
