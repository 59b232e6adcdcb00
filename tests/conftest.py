"""One thread a test process: tests run side by side, and spinning OpenMP threads would fight over the cores.

Without a GPU, Triton's interpreter runs the kernels; it must be chosen before triton is imported. The cache is a folder
of no one's: a profile of this machine would otherwise change plans.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ["MOESPEQ_CACHE"] = str(Path(tempfile.gettempdir()) / f"moespeq-tests-{os.getpid()}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
