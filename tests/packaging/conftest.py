"""One installation for all tests of this folder, with a model, a job and a cluster to work on."""

import pytest
from installed import Installed, install

MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)

    def example_batch(self, samples):
        return {"x": torch.zeros(samples, 16), "target": torch.zeros(samples, 16)}


def build():
    return Net()
"""
JOB = """
format = "pipeplan-job/1"
microbatches = 4
samples_per_microbatch = 2
loss = "mse"
replication = false
"""
CLUSTER = """
format = "pipeplan-cluster/1"

[[nodes]]
name = "here"
devices = 2
type = "CPU-core"
link = "loopback"
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    found = install(tmp_path_factory.mktemp("install"))
    (found.folder / "my_net.py").write_text(MODEL)
    (found.folder / "job.toml").write_text(JOB)
    (found.folder / "cluster.toml").write_text(CLUSTER)
    return found
