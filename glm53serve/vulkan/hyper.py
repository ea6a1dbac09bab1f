"""The hyper-connections around every sub-layer, as dispatches (model spec 3)."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from glm53serve.model.weights import HyperConnection
from glm53serve.vulkan.device import Buffer, Device
from glm53serve.vulkan.linear import VECTOR_ROWS, Op, Stage
from glm53serve.vulkan.scratch import Scratch, Sizes


def constant(device: Device, *parts: NDArray[np.float32]) -> Buffer:
    """Small float32 arrays, one after another, on the device."""
    values = np.concatenate([np.asarray(p, np.float32).ravel() for p in parts])
    buffer = device.local(values.nbytes)
    device.put(buffer, values)
    return buffer


class HcSite:
    """An mHC site and the norm behind it (model spec 3)."""

    def __init__(self, device: Device, sizes: Sizes, site: HyperConnection, norm: NDArray[np.float32]) -> None:
        c = sizes.config
        n, hidden = c.hc_mult, c.hidden_size
        self.sizes = sizes
        self.outputs = (2 + n) * n
        fn = np.zeros((self.outputs, n, sizes.hidden), np.float32)
        fn[:, :, :hidden] = site.fn.reshape(self.outputs, n, hidden)
        self.fn = constant(device, fn)
        head = np.zeros(128, np.float32)
        head[: self.outputs + 3] = np.concatenate([site.base, site.scale])
        weight = np.zeros(sizes.hidden, np.float32)
        weight[:hidden] = norm
        self.constants = constant(device, head, weight)

    def before(self, s: Scratch, bucket: int) -> list[Stage]:
        """x of the sub-layer in `xn`, post and M in `mix`."""
        c, z = self.sizes.config, self.sizes
        width = c.hc_mult * z.hidden
        together = 1 if bucket <= VECTOR_ROWS else 4
        dots = Op(
            "hc_dots",
            {1: 256 if together == 1 else 64, 2: together},
            [s["x"], self.fn, s["dots"]],
            struct.pack("2I", self.outputs, width),
            (-(-(self.outputs + 1) // together), bucket, 1),
            2.0 * bucket * self.outputs * width,
            self.fn.nbytes,
        )
        pre = Op(
            "hc_pre",
            {2: c.hc_mult},
            [s["dots"], self.constants, s["x"], s["xn"], s["mix"]],
            struct.pack("3I2f", c.hidden_size, z.hidden, c.hc_sinkhorn_iters, c.rms_norm_eps, c.hc_eps),
            (bucket, 1, 1),
            4.0 * bucket * width,
        )
        return [[dots], [pre]]

    def after(self, device: Device, s: Scratch, bucket: int, has_y: bool = True, topk: int = 0) -> list[Stage]:
        """X' from the sub-layer's output in `y` and, with topk > 0, the experts' in `ey`."""
        c, z = self.sizes.config, self.sizes
        buffers = [s["x"], s["mix"], s["y"], s.get("ey", device.dummy), s.get("weights", device.dummy)]
        push = struct.pack("3I", z.hidden, has_y, topk)
        flops = 2.0 * bucket * z.hidden * (c.hc_mult * (c.hc_mult + 1) + topk)
        return [[Op("hc_post", {2: c.hc_mult}, buffers, push, (-(-z.hidden // 128), bucket, 1), flops)]]
