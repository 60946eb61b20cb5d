from typing import Any

constexpr = Any
tensor = Any

float32: Any
float64: Any
int32: Any
int64: Any
uint32: Any
uint64: Any

def __getattr__(name: str) -> Any: ...
