"""The product's `Device`: CuPy for compiling, memory and streams, the driver API (cuda-bindings) for launches and loops."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm53serve.cuda.compiling import CudaUnavailable, CudaUnsupported, checked, compiled, refusal
from glm53serve.cuda.runtime import MODULES, Argument, Buffer, HostBuffer, Pointer, TensorMap, kernel_names, kernel_source, pack_arguments
from glm53serve.engine.seam import DeviceLost

MAX_DYNAMIC_SHARED = 227 << 10
GONE = frozenset({46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
"""Error codes after which nothing runs on the context any more: faults of a kernel, uncorrectable memory errors, a device that has gone."""


def _modules() -> tuple[Any, Any]:
    try:
        import cupy
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaUnavailable(f"the CUDA backend needs the packages of glm53serve[cuda]: {error}") from error
    return cupy, driver


def available() -> str | None:
    """Name of the first GPU, or None when there is none to be had."""
    try:
        cupy, _ = _modules()
        if cupy.cuda.runtime.getDeviceCount() < 1:
            return None
        return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())
    except (CudaUnavailable, RuntimeError):
        return None


class CupyGraph:
    """A captured graph."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph, self._stream = graph, stream
        graph.upload(stream)

    def launch(self) -> None:
        """Enqueue it."""
        self._graph.launch(self._stream)


class CupyLoop:
    """A graph with one WHILE node."""

    def __init__(self, driver: Any, executable: Any, stream: Any, keep: tuple[Any, ...]) -> None:
        self._driver, self._executable, self._stream, self._keep = driver, executable, driver.CUstream(stream.ptr), keep

    def launch(self) -> None:
        """Enqueue it."""
        checked(self._driver.cuGraphLaunch(self._executable, self._stream))


class CupyFence:
    """An event."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._cupy = cupy
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record(stream)

    def reached(self) -> bool:
        """The event has happened."""
        return bool(self._event.done)

    def wait(self) -> None:
        """Wait for it, without holding the interpreter."""
        try:
            self._event.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceLost(str(error)) from error


class CupyDevice:
    """GPU number `index` with the kernels compiled for `defines` and loaded. Raises CudaUnavailable. See `Device`."""

    overlap = True
    """Recorded launches overlap their beginnings (programmatic dependent launch)."""

    def __init__(self, defines: Mapping[str, int], index: int = 0, extra_sources: Mapping[str, str] | None = None) -> None:
        self.cupy, self.driver = _modules()
        try:
            count = self.cupy.cuda.runtime.getDeviceCount()
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise CudaUnavailable(f"no NVIDIA GPU: {error}") from error
        if index >= count:
            raise CudaUnavailable(f"GPU {index}: there are {count}")
        self.runtime = self.cupy.cuda.runtime
        self.runtime.setDevice(index)
        properties = self.runtime.getDeviceProperties(index)
        self.name = properties["name"].decode()
        why = refusal(self.name, int(properties["major"]), int(properties["minor"]))
        if why is not None:
            raise CudaUnsupported(why)
        self.runtime.free(0)  # the context, before the driver API is used
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self._stream = self.driver.CUstream(self.stream.ptr)
        self._memory: list[Any] = []
        self._hosts: list[int] = []
        self._functions: dict[str, Any] = {}
        self._dependent = False
        self._pool = self.cupy.cuda.MemoryPool()
        encode = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuTensorMapEncodeTiled
        encode.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 4]
        self._encode_map = encode
        self._load(defines, extra_sources or {})

    def _load(self, defines: Mapping[str, int], extra: Mapping[str, str]) -> None:
        texts = [(name, kernel_source(name), {**defines, **own}) for name, own in MODULES] + [(name, text, dict(defines)) for name, text in extra.items()]
        with ThreadPoolExecutor(len(texts)) as pool:
            cubins = list(pool.map(lambda item: compiled(*item), texts))
        attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        static = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        clusters = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        self._modules = [checked(self.driver.cuModuleLoadData(cubin)) for cubin in cubins]
        for module, (_, text, sizes) in zip(self._modules, texts, strict=True):
            for kernel in kernel_names(text, sizes):
                if "ONLY" in sizes and kernel != f"gemv_{sizes['ONLY']}":
                    continue
                function = checked(self.driver.cuModuleGetFunction(module, kernel.encode()))
                used = checked(self.driver.cuFuncGetAttribute(static, function))
                checked(self.driver.cuFuncSetAttribute(function, attribute, MAX_DYNAMIC_SHARED - used))
                checked(self.driver.cuFuncSetAttribute(function, clusters, 1))  # of more than 8 blocks
                self._functions[kernel] = function

    def alloc(self, nbytes: int) -> Buffer:
        """Zeroed device memory."""
        memory = self._pool.malloc(nbytes)
        memory.memset_async(0, nbytes, self.stream)
        self._memory.append(memory)
        return Buffer(int(memory.ptr), nbytes)

    def host(self, nbytes: int) -> HostBuffer:
        """Zeroed pinned host memory."""
        try:
            address = self.runtime.hostAlloc(nbytes, self.runtime.hostAllocMapped | self.runtime.hostAllocPortable)
        except self.runtime.CUDARuntimeError as error:
            raise MemoryError(f"{nbytes} bytes of pinned host memory: {error}") from error
        self._hosts.append(address)
        view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        view[:] = 0
        return HostBuffer(address, view)

    def _enqueue(self, call: Callable[..., None], *arguments: int) -> None:
        """A copy or fill on the stream. Raises DeviceLost when the device is gone."""
        try:
            call(*arguments, self.stream.ptr)
        except self.runtime.CUDARuntimeError as error:
            if error.status in GONE:
                raise DeviceLost(str(error)) from error
            raise

    def upload(self, to: Pointer, array: NDArray[Any]) -> None:
        """Copy an array to the device (pageable memory is staged before this returns)."""
        flat = np.ascontiguousarray(array)
        self._enqueue(self.runtime.memcpyAsync, int(to), flat.ctypes.data, flat.nbytes, self.runtime.memcpyHostToDevice)

    def download(self, start: Pointer, array: NDArray[Any]) -> None:
        """Copy device memory into an array."""
        try:
            self.runtime.memcpyAsync(array.ctypes.data, int(start), array.nbytes, self.runtime.memcpyDeviceToHost, self.stream.ptr)
            self.stream.synchronize()
        except self.runtime.CUDARuntimeError as error:
            raise DeviceLost(str(error)) from error

    def copy(self, to: Pointer, start: Pointer, nbytes: int) -> None:
        """Copy device memory."""
        self._enqueue(self.runtime.memcpyAsync, int(to), int(start), nbytes, self.runtime.memcpyDeviceToDevice)

    def copy_host(self, to: Pointer, start: HostBuffer, nbytes: int) -> None:
        """Copy pinned memory to the device."""
        self._enqueue(self.runtime.memcpyAsync, int(to), start.address, nbytes, self.runtime.memcpyHostToDevice)

    def zero(self, to: Pointer, nbytes: int) -> None:
        """Zero device memory."""
        self._enqueue(self.runtime.memsetAsync, int(to), 0, nbytes)

    def launch(self, kernel: str, grid: Sequence[int], threads: int, arguments: Sequence[Argument], shared: int = 0, cluster: int = 1) -> None:
        """Enqueue a kernel. See `Device`."""
        array, keep = pack_arguments(arguments)
        x, y, z = (*grid, 1, 1)[:3]
        attributes = self._attributes(cluster)
        if attributes:
            config = self._configured(x, y, z, threads, shared, attributes)
            error = self.driver.cuLaunchKernelEx(config, self._functions[kernel], ctypes.addressof(array), 0)[0]
        else:
            error = self.driver.cuLaunchKernel(self._functions[kernel], x, y, z, threads, 1, 1, shared, self._stream, ctypes.addressof(array), 0)[0]
        del keep
        if int(error) != 0:
            raise (DeviceLost if int(error) in GONE else RuntimeError)(f"launching {kernel}: {error}")

    def _attributes(self, cluster: int) -> list[Any]:
        """Of a launch: recorded ones may start before the kernel ahead of them has ended (kernels wait by themselves, see common.cuh)."""
        d, attributes = self.driver, []
        if self._dependent:
            early = d.CUlaunchAttribute()
            early.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        if cluster > 1:
            together = d.CUlaunchAttribute()
            together.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            together.value.clusterDim.x, together.value.clusterDim.y, together.value.clusterDim.z = cluster, 1, 1
            attributes.append(together)
        return attributes

    def _configured(self, x: int, y: int, z: int, threads: int, shared: int, attributes: list[Any]) -> Any:
        config = self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, self._stream
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def tensor_map(self, start: Pointer, rows: int, row_bytes: int, box_rows: int) -> TensorMap:
        """A map of bf16 rows whose boxes land swizzled by 128 bytes."""
        room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)  # the driver wants 64-byte alignment, which the bindings' own object has not
        made = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
        sizes, stride = (ctypes.c_uint64 * 2)(row_bytes // 2, rows), (ctypes.c_uint64 * 1)(row_bytes)
        box, steps = (ctypes.c_uint32 * 2)(64, box_rows), (ctypes.c_uint32 * 2)(1, 1)
        d = self.driver
        error = self._encode_map(
            ctypes.addressof(made), int(d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16), 2, int(start), sizes, stride, box, steps,
            int(d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE), int(d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
            int(d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B), int(d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )  # fmt: skip
        if error:
            raise RuntimeError(f"a tensor map of {rows} rows of {row_bytes} bytes at {int(start):#x}: CUDA driver error {error}")
        return TensorMap.from_buffer_copy(made)

    def record(self, body: Callable[[], None]) -> CupyGraph:
        """Capture the launches of `body`, each allowed to start while the one before it ends."""
        with self.stream:
            self.stream.begin_capture()
            self._dependent = self.overlap
            try:
                body()
            except BaseException:
                self._abandon_capture()
                raise
            finally:
                self._dependent = False
            graph = self.stream.end_capture()
        return CupyGraph(graph, self.stream)

    def _abandon_capture(self) -> None:
        try:
            self.stream.end_capture()
        except self.runtime.CUDARuntimeError:
            return  # the capture was already invalid; the first error is the one that is raised

    def record_loop(self, body: Callable[[int], None]) -> CupyLoop:
        """Capture `body` into a WHILE node."""
        d = self.driver
        graph, context = checked(d.cuGraphCreate(0)), checked(d.cuCtxGetCurrent())
        handle = checked(d.cuGraphConditionalHandleCreate(graph, context, 1, 1))
        node = d.CUgraphNodeParams()
        node.type = d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle = handle
        node.conditional.type = d.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        node.conditional.size = 1
        node.conditional.ctx = context
        checked(d.cuGraphAddNode(graph, None, None, 0, node))
        inner = node.conditional.phGraph_out[0]
        checked(d.cuStreamBeginCaptureToGraph(self._stream, inner, None, None, 0, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            body(int(handle))
        finally:
            result = d.cuStreamEndCapture(self._stream)
        checked(result)
        executable = checked(d.cuGraphInstantiate(graph, 0))
        checked(d.cuGraphUpload(executable, self._stream))
        self.stream.synchronize()
        return CupyLoop(d, executable, self.stream, (graph, handle, node))

    def fence(self) -> CupyFence:
        """A fence behind everything enqueued so far."""
        return CupyFence(self.cupy, self.stream)

    def synchronize(self) -> None:
        """Wait for everything enqueued."""
        try:
            self.stream.synchronize()
        except self.runtime.CUDARuntimeError as error:
            raise DeviceLost(str(error)) from error

    def idle(self) -> bool:
        """Nothing enqueued is left to run."""
        try:
            return bool(self.stream.done)
        except self.runtime.CUDARuntimeError as error:
            raise DeviceLost(str(error)) from error

    def free_bytes(self) -> int:
        """Device memory not in use."""
        return int(self.runtime.memGetInfo()[0]) + int(self._pool.free_bytes())

    def close(self) -> None:
        """Release everything allocated here."""
        self.stream.synchronize()
        self._memory.clear()
        self._pool.free_all_blocks()
        for address in self._hosts:
            self.runtime.freeHost(address)
        self._hosts.clear()
