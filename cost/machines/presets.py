"""The clusters known by name, as plain data, each number with its source.

Peak rates are the dense ones (datasheets print tensor-core rates with sparsity, twice as high); float32 is the IEEE
rate that torch uses by default, not TF32. Link bandwidths are for one direction: half of what datasheets print.
Servers differ in their network adapters and PCIe trees: `dataclasses.replace` a preset to describe yours.

What the comments call by short names. NCCL's constants and the DGX H100 and H200 pages were read in November 2026; the
rates of datasheets agree with reprints of them, and the adapters of DGX A100 and 2-8-5-200 were not looked up again:
- H100, H200, A100 and L40S datasheets, as nvidia.com has them for the product; the H100 ("NVIDIA H100 Tensor Core GPU
  Architecture") and Ada ("NVIDIA Ada GPU Architecture") whitepapers.
- DGX H100, DGX H200: docs.nvidia.com, DGX BasePOD reference architecture, core components: 8 devices, 4 NVSwitches and
  "eight single-port NVIDIA ConnectX-7 VPI, up to 400 Gb/s".
- DGX B200, HGX B200: NVIDIA's specifications, read from reprints in November 2026 (glennklockwood.com/garden,
  processors, B200; the wiki of NVIDIA's AIPS-Boom, DGX B200), not from NVIDIA's own page.
- DGX A100: DGX SuperPOD reference architecture RA-09950: 8 devices, 6 NVSwitches, 8 adapters of 200 Gb/s for compute.
- Configuration 2-8-5-200: NVIDIA Enterprise Reference Architectures: processors, devices, adapters, Gb/s per device.
- GA102, Ada and RTX Blackwell: "NVIDIA Ampere GA102 GPU Architecture", "NVIDIA Ada GPU Architecture" and "NVIDIA RTX
  Blackwell GPU Architecture" whitepapers, their appendices on GeForce cards; rates, bandwidths and sizes agree with
  reprints read in November 2026, but of the RTX 3060 and the RTX 4060 Ti, whose rates of tensor cores stand there as
  the multiples of float32 that the other cards of their generation have.
- NCCL: github.com/NVIDIA/nccl, version 2.30.7, src/graph/tuning.cc, ncclTunerConstantsDefaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What holds of every CUDA device here. Latencies are seconds per step of a ring with the "Simple" protocol, which large
# messages use: NCCL, hwLatencies.
CUDA = {
    "inter_latency": 14e-6,  # hwLatencies, NET, ring, Simple; 9.6 before version 2.18
    # The smallest side of the tiles that the guide lists for cuBLAS: NVIDIA, "Matrix Multiplication Background User's
    # Guide" (DU-09799), sections 2.3 and 3.1.
    "matmul_tile": 64,
    # A short kernel launched back to back with others takes 3.8e-6 s of which 2.9e-6 are its own on a V100: NVIDIA,
    # "Getting Started with CUDA Graphs", developer.nvidia.com/blog/cuda-graphs. Small operators of a model are of that
    # kind, eager dispatch is slower.
    "launch_overhead": 4e-6,
    "collective_overhead": 8.4e-6,  # before the first step: NCCL, baseLatencies, ring, Simple
}
NVLINK = {**CUDA, "intra_latency": 3.4e-6, "switch": True}  # hwLatencies, NVLINK, ring, Simple; NVSwitch
PCIE = {**CUDA, "intra_latency": 5.7e-6, "switch": False}  # hwLatencies, PCI, ring, Simple

H100_SXM_PEAK = {  # NVIDIA H100 datasheet, column SXM; with sparsity the tensor cores' rates are printed twice as high
    "float64": 67e12,  # "FP64 Tensor Core"
    "float32": 67e12,  # "FP32"
    "bfloat16": 989.4e12,  # "BFLOAT16 Tensor Core", dense, as the H100 architecture whitepaper prints it
    "float16": 989.4e12,  # "FP16 Tensor Core", dense, whitepaper
    "float8_e4m3fn": 1978.9e12,  # "FP8 Tensor Core", dense, whitepaper
    "float8_e5m2": 1978.9e12,  # "FP8 Tensor Core", dense, whitepaper
    "int8": 1978.9e12,  # "INT8 Tensor Core", dense, whitepaper
}

A100_PEAK = {  # NVIDIA A100 datasheet, the same for SXM and PCIe
    "float64": 19.5e12,  # "FP64 Tensor Core"
    "float32": 19.5e12,  # "FP32"
    "bfloat16": 312e12,  # "BFLOAT16 Tensor Core", dense
    "float16": 312e12,  # "FP16 Tensor Core", dense
    "int8": 624e12,  # "INT8 Tensor Core", dense
}


def _geforce(card: str, float32: float, bandwidth: float, size: float, link: float, float8: bool) -> dict[str, Any]:
    """A GeForce card of a PC: bfloat16 and float16 with float32 sums at twice the float32 rate, int8 at eight times."""
    rates = {"float64": 1 / 64, "float32": 1.0, "bfloat16": 2.0, "float16": 2.0, "int8": 8.0}  # GA102, Ada: appendices
    rates |= dict.fromkeys(["float8_e4m3fn", "float8_e5m2"], 4.0) if float8 else {}  # Ada: with float32 sums
    return {
        **PCIE,
        "device": f"NVIDIA GeForce {card} {size / 1e9:.0f}GB",  # the units of the whitepapers
        "peak_flops": {dtype: times * float32 for dtype, times in rates.items()},
        "memory_bandwidth": bandwidth,
        "memory_size": size,
        "devices_per_node": 8,  # no whitepaper says how many cards a PC holds: `ranks` say which there are
        "intra_bandwidth": link,
        "inter_bandwidth": 1.25e9,  # assumed: one 10 Gb/s Ethernet adapter in a PC, which its cards share
        "source": "NVIDIA's whitepaper of the card's architecture; NCCL tuning.cc (latency); 10 Gb/s Ethernet assumed",
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "h100": {
        **NVLINK,
        "device": "NVIDIA H100 SXM5 80GB",
        "peak_flops": H100_SXM_PEAK,
        "memory_bandwidth": 3.35e12,  # datasheet
        "memory_size": 80e9,  # datasheet
        "devices_per_node": 8,  # DGX H100
        "intra_bandwidth": 450e9,  # datasheet: NVLink 4, 900 GB/s both ways
        "inter_bandwidth": 50e9,  # DGX H100 datasheet: one 400 Gb/s ConnectX-7 per device
        "source": "NVIDIA H100 and DGX H100 datasheets; NCCL tuning.cc (latency)",
    },
    "h200": {
        **NVLINK,
        "device": "NVIDIA H200 SXM 141GB",
        "peak_flops": H100_SXM_PEAK,  # H200 datasheet: the rates of the H100 SXM
        "memory_bandwidth": 4.8e12,  # datasheet
        "memory_size": 141e9,  # datasheet
        "devices_per_node": 8,  # DGX H200
        "intra_bandwidth": 450e9,  # datasheet: NVLink 4, 900 GB/s both ways
        "inter_bandwidth": 50e9,  # DGX H200 datasheet: one 400 Gb/s ConnectX-7 per device
        "source": "NVIDIA H200 and DGX H200 datasheets; NCCL tuning.cc (latency)",
    },
    "b200": {
        **NVLINK,
        "device": "NVIDIA B200 SXM 180GB",
        "peak_flops": {  # a GPU of HGX and DGX B200; dense rates are half of those with sparsity
            "float64": 40e12,  # "FP64"
            "float32": 80e12,  # "FP32"
            "bfloat16": 2.25e15,  # "BF16 Tensor Core", 4.5e15 with sparsity
            "float16": 2.25e15,  # "FP16 Tensor Core", 4.5e15 with sparsity
            "float8_e4m3fn": 4.5e15,  # "FP8 Tensor Core", 72e15 a system of 8 with sparsity
            "float8_e5m2": 4.5e15,  # "FP8 Tensor Core", 72e15 a system of 8 with sparsity
            "int8": 4.5e15,  # "INT8 Tensor Core", 9e15 with sparsity
        },
        "memory_bandwidth": 8e12,  # DGX B200: 64 TB/s a system of 8
        "memory_size": 180e9,  # DGX B200: 1,440 GB a system of 8
        "devices_per_node": 8,  # DGX B200
        "intra_bandwidth": 900e9,  # DGX B200: NVLink 5, 14.4 TB/s both ways a system of 8
        "inter_bandwidth": 50e9,  # DGX B200: one 400 Gb/s ConnectX-7 per device
        "source": "NVIDIA DGX B200 and HGX B200 specifications, by reprints; NCCL tuning.cc (latency)",
    },
    "a100": {
        **NVLINK,
        "device": "NVIDIA A100 SXM4 80GB",
        "peak_flops": A100_PEAK,
        "memory_bandwidth": 2.039e12,  # datasheet
        "memory_size": 80e9,  # datasheet
        "devices_per_node": 8,  # DGX A100
        "intra_bandwidth": 300e9,  # datasheet: NVLink 3, 600 GB/s both ways
        "inter_bandwidth": 25e9,  # DGX A100 datasheet: one 200 Gb/s HDR adapter per device
        "source": "NVIDIA A100 and DGX A100 datasheets; NCCL tuning.cc (latency)",
    },
    "a100-pcie": {
        **PCIE,
        "device": "NVIDIA A100 PCIe 80GB",
        "peak_flops": A100_PEAK,
        "memory_bandwidth": 1.935e12,  # datasheet
        "memory_size": 80e9,  # datasheet
        "devices_per_node": 8,  # datasheet: certified systems of 1 to 8 devices
        "intra_bandwidth": 32e9,  # datasheet: PCIe 4 x16, 64 GB/s both ways; no NVLink bridge assumed
        "inter_bandwidth": 25e9,  # assumed as in DGX A100: one 200 Gb/s adapter per device
        "source": "NVIDIA A100 datasheet; NCCL tuning.cc (latency); one 200 Gb/s adapter per device assumed",
    },
    "l40s": {
        **PCIE,
        "device": "NVIDIA L40S 48GB",
        "peak_flops": {  # L40S datasheet
            "float64": 91.6e12 / 64,  # Ada architecture whitepaper: 1/64 of the float32 rate
            "float32": 91.6e12,  # "FP32"
            "bfloat16": 362.05e12,  # "BFLOAT16 Tensor Core", dense
            "float16": 362.05e12,  # "FP16 Tensor Core", dense
            "float8_e4m3fn": 733e12,  # "FP8 Tensor Core", dense
            "float8_e5m2": 733e12,  # "FP8 Tensor Core", dense
            "int8": 733e12,  # "INT8 Tensor Core", dense
        },
        "memory_bandwidth": 864e9,  # datasheet
        "memory_size": 48e9,  # datasheet
        "devices_per_node": 8,  # NVIDIA reference configuration 2-8-5-200
        "intra_bandwidth": 32e9,  # datasheet: PCIe 4 x16, 64 GB/s both ways; the card has no NVLink
        "inter_bandwidth": 25e9,  # NVIDIA reference configuration 2-8-5-200: 200 Gb/s per device
        "source": "NVIDIA L40S datasheet, Ada whitepaper, configuration 2-8-5-200; NCCL tuning.cc (latency)",
    },
    # Card: float32 rate, memory's bandwidth and size, one direction of its PCIe slot.
    "rtx3060": _geforce("RTX 3060", 12.7e12, 360e9, 12e9, 32e9, False),  # specification: 3,584 cores, PCIe 4 x16
    "rtx3090": _geforce("RTX 3090", 35.6e12, 936e9, 24e9, 32e9, False),  # GA102, PCIe 4 x16; no NVLink bridge assumed
    "rtx4060ti": _geforce("RTX 4060 Ti", 22.1e12, 288e9, 16e9, 16e9, True),  # specification: PCIe 4 x8
    "rtx4080": _geforce("RTX 4080", 48.7e12, 716.8e9, 16e9, 32e9, True),  # Ada, PCIe 4 x16
    "rtx4090": _geforce("RTX 4090", 82.6e12, 1008e9, 24e9, 32e9, True),  # Ada, PCIe 4 x16
    "rtx5090": _geforce("RTX 5090", 104.8e12, 1792e9, 32e9, 64e9, True),  # RTX Blackwell, PCIe 5 x16
    # Processes on one machine with gloo over loopback, one thread each. Orders of magnitude, measured with torch 2.13
    # on a two-core AVX-512/AMX server: 1024^3 matmuls, a 128 MiB copy, all-reduce of 4 B and 64 MiB over two ranks.
    "local": {
        "device": "one CPU core",
        "peak_flops": {"float64": 74e9, "float32": 148e9, "bfloat16": 1.1e12},  # measured: matmuls
        "memory_bandwidth": 14e9,  # measured: the copy
        "memory_size": 16e9,  # nominal
        "devices_per_node": 64,  # every rank is on the one machine
        "intra_latency": 130e-6,  # measured: all-reduce of 4 B
        "intra_bandwidth": 1.1e9,  # measured: all-reduce of 64 MiB
        "inter_latency": 130e-6,  # there is one node
        "inter_bandwidth": 1.1e9,  # there is one node
        "switch": True,  # any process reaches any other through the kernel
        "matmul_tile": 16,  # [2048, 1024] by [1024, n], float32: 2 to 16 columns take as long, 24 half as long again
        "launch_overhead": 1e-6,  # measured: dispatch of an operator on 8 elements
        "collective_overhead": 1e-6,  # that of an operator: the rest is in intra_latency as measured
        "overlaps": False,  # what sends between CPU processes takes the cores that compute
        "source": "measured on a two-core server with torch 2.13 and gloo",
    },
}
