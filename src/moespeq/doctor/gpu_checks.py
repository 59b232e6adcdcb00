"""From facts of the GPU and its link to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from moespeq.config import format_bytes
from moespeq.doctor.findings import Finding, fine, problem, skipped, warning
from moespeq.doctor.machine import CardState, GpuFacts, HostFacts, PinFacts

__all__ = ["check_gpu"]

_LEAST_FREE_SHARE = 0.5  # of the device's memory: what an engine takes when nothing is said is all that is free
_GIGABYTES_PER_S_A_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}  # by generation of PCIe
_LEAST_LINK_SHARE = 0.6  # of what the lanes carry
_NOT_CHECKED = "Device memory, PCIe link, pinning, link speed, copy engines and NUMA are then not checked."


def check_gpu(gpu: GpuFacts, host: HostFacts) -> Iterator[Finding]:
    """Whether an engine can run on the GPU, then what its link does; without a GPU says what is not checked."""
    if gpu.refusal is not None:
        if gpu.card is None:
            yield skipped("GPU", f"{gpu.refusal} {_NOT_CHECKED}")
        else:
            told = f"driver {gpu.card.driver} shows {gpu.card.name}, and no engine can use it: {gpu.refusal}"
            yield problem("GPU", told, f"torch, Triton and the driver do not fit together; {_NOT_CHECKED}", _INSTALL)
        return
    yield _identity(gpu)
    if gpu.card is None:
        reason = "NVML does not answer; `pip install nvidia-ml-py` and a driver of this host's give it"
        yield from (skipped(name, reason) for name in ("device memory", "PCIe link"))
    else:
        yield _memory(gpu.card)
        yield _pcie(gpu.card)
    yield from _pinning(gpu.pin, gpu.card, host)
    yield _copy_engines(gpu)
    yield _numa(gpu, host)


_INSTALL = "pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu130"


def _identity(gpu: GpuFacts) -> Finding:
    capability = "unknown" if gpu.capability is None else ".".join(map(str, gpu.capability))
    driver = "" if gpu.card is None else f", driver {gpu.card.driver} for CUDA up to {gpu.card.cuda}"
    return fine("GPU", f"{gpu.name}, compute capability {capability} with bf16{driver}")


def _memory(card: CardState) -> Finding:
    told = f"{format_bytes(card.free_bytes)} free of {format_bytes(card.total_bytes)}"
    holders = ", ".join(
        f"{one.name} ({one.pid}){'' if one.num_bytes is None else f' {format_bytes(one.num_bytes)}'}"
        for one in card.processes
    )
    told = f"{told}; held by {holders}" if holders else told
    if card.free_bytes >= _LEAST_FREE_SHARE * card.total_bytes:
        return fine("device memory", told)
    cause = "other processes hold the rest" if holders else "a process this one cannot see holds the rest"
    remedy = f"end it, or load with --device-memory {format_bytes(0.95 * card.free_bytes).replace(' ', '')}"
    return warning("device memory", told, cause, remedy)


def _pcie(card: CardState) -> Finding:
    if not (card.generation and card.max_generation and card.width and card.max_width):
        return skipped("PCIe link", "the driver does not say, as in most virtual machines")
    told = f"generation {card.generation} x{card.width} under copies, at most {card.max_generation} x{card.max_width}"
    if card.width < card.max_width:
        cause = "the card has fewer lanes than it could: a slot of fewer lanes, a riser, or a card that sits loosely"
        remedy = "move the card to a slot with all lanes; `lspci -vv` shows LnkCap and LnkSta"
        return warning("PCIe link", told, cause, remedy)
    if card.generation < card.max_generation:
        cause = "the link runs at a lower generation even under copies: the BIOS, a riser, or power saving"
        return warning(
            "PCIe link",
            told,
            cause,
            "set the slot to Auto or its generation in the BIOS, then `nvidia-smi -q -d PERFORMANCE`",
        )
    return fine("PCIe link", told)


def _pinning(pin: PinFacts | None, card: CardState | None, host: HostFacts) -> Iterator[Finding]:
    if pin is None:
        yield from (skipped(name, "no memory was pinned as a trial") for name in ("pinning", "link speed"))
        return
    limit = "no limit" if host.memlock_bytes is None else f"a limit of {format_bytes(host.memlock_bytes)}"
    if pin.refusal is not None:
        where = f"{host.container} allows less pinned memory" if host.container else "a limit of locked memory"
        remedy = "ulimit -l unlimited (Docker: --ulimit memlock=-1; WSL: more memory in .wslconfig)"
        told = f"{format_bytes(pin.num_bytes)} were refused: {pin.refusal}; `ulimit -l` says {limit}"
        yield problem("pinning", told, f"{where}; copies then take a detour, at a fraction of the link's speed", remedy)
        yield skipped("link speed", "nothing is pinned to copy from")
        return
    rate = f"{pin.num_bytes / pin.seconds / 1e9:.1f} GB/s" if pin.seconds > 0 else "at once"
    yield fine("pinning", f"{format_bytes(pin.num_bytes)} pinned at {rate}; `ulimit -l` says {limit}")
    yield _link_speed(pin, card)


def _link_speed(pin: PinFacts, card: CardState | None) -> Finding:
    if pin.copy_bytes_per_s is None:
        return skipped("link speed", "no copy was measured")
    told = f"{pin.copy_bytes_per_s / 1e9:.1f} GB/s from pinned memory"
    lane = None if card is None or card.generation is None else _GIGABYTES_PER_S_A_LANE.get(card.generation)
    if lane is None or card is None or card.width is None:
        return fine("link speed", told)
    most_bytes_per_s = lane * card.width * 1e9
    told = f"{told}, of {most_bytes_per_s / 1e9:.0f} that the lanes carry"
    if pin.copy_bytes_per_s >= _LEAST_LINK_SHARE * most_bytes_per_s:
        return fine("link speed", told)
    cause = (
        "somebody else uses the link, the memory lies on another NUMA node, or a virtual machine's IOMMU slows copies"
    )
    return warning(
        "link speed", told, cause, "end other copies, or `numactl --cpunodebind=NODE --membind=NODE moespeq ...`"
    )


def _copy_engines(gpu: GpuFacts) -> Finding:
    if gpu.copy_engines is None:
        return skipped("copy engines", "the driver does not say")
    told = f"{gpu.copy_engines} beside the multiprocessors"
    if gpu.copy_engines >= 1:
        return fine("copy engines", told)
    cause = "without one, copies and kernels take turns: a MIG slice or virtual GPU without copy engines"
    return warning(
        "copy engines", told, cause, "use a whole GPU, or a MIG profile with a copy engine (`nvidia-smi mig -lgip`)"
    )


def _numa(gpu: GpuFacts, host: HostFacts) -> Finding:
    nodes = ", ".join(map(str, host.cpu_nodes))
    if gpu.numa_node is None:
        return skipped("NUMA", f"the system does not say where the GPU hangs; this process runs on node {nodes}")
    told = f"the GPU hangs on node {gpu.numa_node}, this process runs on node {nodes}"
    if gpu.numa_node in host.cpu_nodes:
        return fine("NUMA", told)
    remedy = f"numactl --cpunodebind={gpu.numa_node} --membind={gpu.numa_node} moespeq ..."
    return warning("NUMA", told, "launches and disk reads then cross the link between the processors", remedy)
