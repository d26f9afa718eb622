"""Whether vLLM can use NCCL. Without a library that it can use, its broadcasts return at once and move nothing."""

from __future__ import annotations

from vlarl.errors import VlarlError

REMEDY = (
    "install the NCCL of vLLM's own torch (pip install -U nvidia-nccl-cu13), name another libnccl.so.2 in "
    "VLLM_NCCL_SO_PATH, or send weights by --vllm.sync_backend object_store"
)


def require_nccl() -> None:
    """VlarlError where vLLM would leave NCCL out in this process.

    vLLM disables its communicator without a word if the library is missing, or lacks functions that newer ones have.
    Weights that were sent through it would arrive as whatever was in the receiver's memory.
    """
    from vllm import envs
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    if envs.VLLM_DISABLE_PYNCCL:
        raise VlarlError("vllm.sync_backend nccl: VLLM_DISABLE_PYNCCL is set, which turns NCCL off in vLLM; unset it")
    try:
        NCCLLibrary()
    except (OSError, AttributeError, ValueError) as error:  # not there, too old, or a torch without CUDA
        raise VlarlError(f"vllm.sync_backend nccl: vLLM can't use the NCCL library ({error}); {REMEDY}") from error
