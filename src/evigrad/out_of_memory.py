"""How exceptions say that memory did not suffice."""

import torch

# Of the CPU's allocator, and of libraries that allocate past PyTorch's.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory did not suffice, on whatever device.

    Args:
        error: Any exception.

    Returns:
        True for those of PyTorch's allocators, of Python and of CUDA's libraries.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)
