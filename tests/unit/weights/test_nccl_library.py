"""vLLM leaves NCCL out without a word where it can't use the library: weights would never arrive."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import pytest

from vlarl.errors import VlarlError
from vlarl.weights.nccl_library import require_nccl


@pytest.fixture
def vllm(monkeypatch):
    """vLLM's two modules that decide about NCCL; `library` is what loading it does."""

    def installed(library, disabled=False):
        package, wrapper = ModuleType("vllm"), ModuleType("pynccl_wrapper")
        package.envs = SimpleNamespace(VLLM_DISABLE_PYNCCL=disabled)
        wrapper.NCCLLibrary = library
        monkeypatch.setitem(sys.modules, "vllm", package)
        for name in ("vllm.distributed", "vllm.distributed.device_communicators"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "vllm.distributed.device_communicators.pynccl_wrapper", wrapper)

    return installed


def test_a_usable_library_is_accepted(vllm):
    vllm(lambda: None)
    require_nccl()


def test_a_library_without_newer_functions_is_refused(vllm):
    vllm(lambda: ctypes.CDLL(None).ncclCommSuspend)  # what vLLM does for NCCL 2.28
    with pytest.raises(VlarlError, match=r"can't use the NCCL library .*ncclCommSuspend.*VLLM_NCCL_SO_PATH"):
        require_nccl()


def test_a_missing_library_is_refused(vllm):
    vllm(lambda: ctypes.CDLL("libnccl.so.nowhere"))
    with pytest.raises(VlarlError, match="libnccl.so.nowhere.*object_store"):
        require_nccl()


def test_nccl_that_is_turned_off_is_refused(vllm):
    vllm(lambda: None, disabled=True)
    with pytest.raises(VlarlError, match="VLLM_DISABLE_PYNCCL is set"):
        require_nccl()
