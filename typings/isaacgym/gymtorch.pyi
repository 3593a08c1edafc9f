# Isaac Gym's bridge to torch; the PyPI package isaacgym-stubs has gymapi only. Both sides share memory.
from torch import Tensor as TorchTensor

from isaacgym.gymapi import Tensor

def wrap_tensor(gym_tensor: Tensor, offsets: tuple[int, ...] | None = ..., counts: tuple[int, ...] | None = ...) -> TorchTensor: ...
def unwrap_tensor(torch_tensor: TorchTensor) -> Tensor: ...
