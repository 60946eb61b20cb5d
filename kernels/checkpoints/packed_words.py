"""Codes from packed bytes: the lowest bits first, as unsigned numbers that become signed around the middle."""

from __future__ import annotations

import torch


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return codes of -8 to 7 from nibbles of 0 to 15, twice as many as there are bytes in the last dimension."""
    packed = packed.view(torch.uint8)
    codes = torch.empty((*packed.shape, 2), dtype=torch.uint8)
    torch.bitwise_and(packed, 0xF, out=codes[..., 0])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1])
    return codes.view(torch.int8).sub_(8).view(*packed.shape[:-1], -1)


def unpack_bytes(packed: torch.Tensor) -> torch.Tensor:
    """Return codes of -128 to 127 from bytes of 0 to 255."""
    return (packed.view(torch.uint8) ^ 0x80).view(torch.int8)


def pack_nibbles(codes_OI: torch.Tensor) -> torch.Tensor:
    """Return 32-bit words of eight codes of -8 to 7 each; the last one of a row is filled up with zeros."""
    nibbles = _filled(codes_OI, 8) + 8
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).view(torch.uint8).view(torch.int32)


def pack_bytes(codes_OI: torch.Tensor) -> torch.Tensor:
    """Return 32-bit words of four codes of -128 to 127 each."""
    return (_filled(codes_OI, 4).view(torch.uint8) ^ 0x80).view(torch.int32)


def _filled(codes_OI: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(codes_OI, (0, -codes_OI.shape[1] % multiple))
