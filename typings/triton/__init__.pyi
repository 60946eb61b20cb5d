"""What kernels/triton uses of Triton, so that the product is type-checked where Triton is not installed.

Triton's language gives no types to what a kernel computes with: a tensor in the compiler is not a Python value.
"""

from collections.abc import Callable
from typing import Any, Protocol

from triton import language as language

class Kernel(Protocol):
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def jit(fn: Callable[..., Any]) -> Kernel: ...
def cdiv(x: int, y: int) -> int: ...
def next_power_of_2(n: int) -> int: ...

__version__: str

def compile(source: Any, *, target: Any = ..., options: dict[str, Any] | None = ...) -> Any: ...
