"""What the system knows of a card on the PCI bus: which memory node it hangs on, and how wide its link is.

All of it may be missing (virtual machines, containers): then the answer is None, and nothing depends on it but speed.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["link_of", "numa_node_of"]

_DEVICES = Path("/sys/bus/pci/devices")
_GENERATIONS = {"2.5": "1.0", "5.0": "2.0", "8.0": "3.0", "16.0": "4.0", "32.0": "5.0", "64.0": "6.0"}  # by GT/s a lane


def numa_node_of(address: str, devices: Path = _DEVICES) -> int | None:
    """The memory node next to the card at `address`, such as 0000:1b:00.0."""
    text = _read(devices / address / "numa_node")
    return int(text) if text.isdigit() else None  # -1: the system does not know


def link_of(address: str, devices: Path = _DEVICES) -> str | None:
    """The fastest link the card and its slot agree on, such as 'PCIe 5.0 x16'; an idle card may run a slower one."""
    speed, _, _ = _read(devices / address / "max_link_speed").partition(" ")
    width = _read(devices / address / "max_link_width")
    if speed not in _GENERATIONS or not width.isdigit():
        return None
    return f"PCIe {_GENERATIONS[speed]} x{width}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
