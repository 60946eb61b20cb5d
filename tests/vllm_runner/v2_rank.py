"""The process of a rank that follows rank 0 with runner V2, on the stand-ins for a GPU."""

from __future__ import annotations

import sys

from quipu.kernels.vllm_runner import rank_process
from tests.vllm_runner import v2_stand_ins

if __name__ == "__main__":
    v2_stand_ins.install()
    rank_process.main(sys.argv[1:])
