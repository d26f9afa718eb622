"""Why a device can't be used, and what helps. Torch itself is as it would be on another machine."""

import pytest
import torch

from vlarl.devices import usable_device
from vlarl.errors import UsageError


def refused(wanted: str) -> str:
    with pytest.raises(UsageError) as error:
        usable_device("run.device", wanted)
    return str(error.value)


@pytest.fixture
def torch_of(monkeypatch):
    """Make torch one that was built for CUDA or not, and that sees so many GPUs."""

    def build(version: str, cuda: str | None, num_gpus: int = 0) -> None:
        def fail(*args, **kwargs):
            raise RuntimeError("invalid device ordinal\nmore of it")

        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch, "empty", fail)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return build


def test_the_cpu():
    assert usable_device("run.device", "cpu") == torch.device("cpu")


def test_a_build_for_the_cpu_is_refused_with_how_to_get_that_for_cuda(torch_of):
    torch_of("2.9.1+cpu", None)
    message = refused("cuda")
    assert message.startswith(
        "run.device: 'cuda' can't be used here: this torch (2.9.1+cpu) is built for the CPU only. "
    )
    assert "`pip uninstall -y torch && pip install torch==2.9.1` (https://pytorch.org/get-started has" in message


def test_a_build_for_cuda_without_a_gpu(torch_of, monkeypatch):
    torch_of("2.9.1+cu128", "12.8")
    message = refused("cuda")
    assert "torch (2.9.1+cu128, built for CUDA 12.8) sees no GPU. Check the driver with `nvidia-smi`" in message
    assert "pip" not in message
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "sees no GPU. CUDA_VISIBLE_DEVICES is '': unset it if it hides them." in refused("cuda:0")


def test_a_gpu_too_many(torch_of):
    torch_of("2.9.1", "12.8", num_gpus=2)
    assert refused("cuda:2") == "run.device: 'cuda:2' can't be used here: torch sees 2 GPUs: use cuda:0 or cuda:1."
    assert refused("cuda:1").endswith("can't be used here: invalid device ordinal; try `cpu`.")


def test_another_device(torch_of):
    torch_of("2.9.1", None)
    assert refused("mps") == "run.device: 'mps' can't be used here: invalid device ordinal; try `cpu`."
