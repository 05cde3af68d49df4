"""Two processes take the steps of one process with twice the batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

# Gradients are summed in two parts instead of one, in float32; weights and losses are of size 1 to 10.
CLOSE = 2e-5

SCRIPT = """
import json, os, sys
import torch
from accelerate.tracking import GeneralTracker
import specdeft.train.run
from specdeft.train import train
from tests.tiny import tiny
from tests.train.test_training import cycles, quiet

class Curve(GeneralTracker):
    name, requires_logging_directory, main_process_only = "curve", False, True
    tracker = None
    def __init__(self):
        super().__init__()
        self.losses = []
    def store_init_configuration(self, values):
        pass
    def log(self, values, step=None, **kwargs):
        self.losses.append([step, values["loss"], values["lr"]])

specdeft.train.run.LOOK_EVERY = 1
curve, count = Curve(), int(os.environ.get("WORLD_SIZE", "1"))
heads = train(tiny(), None, cycles(13), num_heads=2, kind="hydra", lm_head="own", epochs=3, log=quiet,
              batch_tokens=96 // count, learning_rate=3e-3, log_with=[curve])
if os.environ.get("RANK", "0") == "0":
    torch.save({"curve": json.dumps(curve.losses), "heads": heads.state_dict()}, sys.argv[1])
"""


def test_two_processes_follow_the_curve_of_one_with_twice_the_batch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    for name, start in (("one", []), ("two", launcher)):
        command = [sys.executable, *start, str(tmp_path / "script.py"), str(tmp_path / name)]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one", "two"))
    curves = [torch.tensor(json.loads(each["curve"])) for each in (one, two)]
    assert len(curves[0]) > 4
    assert curves[0][-1, 1] < 0.8 * curves[0][0, 1], "nothing was learnt: any two curves would do"
    torch.testing.assert_close(curves[0], curves[1], atol=CLOSE, rtol=CLOSE)
    for name, value in one["heads"].items():
        torch.testing.assert_close(two["heads"][name], value, atol=CLOSE, rtol=CLOSE)
