"""What keeps a wheel from being published."""

from __future__ import annotations

import pytest

from scripts.check_wheel import LIBRARIES, NATIVE, faults

METADATA = """Metadata-Version: 2.4
Name: quipu-llm
Version: 0.2.0
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Description-Content-Type: text/markdown
"""
X86 = "quipu_llm-0.2.0-cp311-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
ARM = "quipu_llm-0.2.0-cp311-abi3-manylinux_2_28_aarch64.whl"
WHOLE = {NATIVE, "quipu/__init__.py", *LIBRARIES}


@pytest.mark.parametrize(("name", "members"), [(X86, WHOLE), (ARM, WHOLE - LIBRARIES)])
def test_whole_wheels_pass(name: str, members: set[str]) -> None:
    """A wheel for x86-64 has the kernels of every instruction set, one for arm64 has none; both have the C module."""
    assert list(faults(name, members, METADATA)) == []


@pytest.mark.parametrize(
    ("name", "members", "metadata", "fault"),
    [
        (X86, WHOLE - {NATIVE}, METADATA, "lacks quipu/actors"),
        (X86, WHOLE - {min(LIBRARIES)}, METADATA, "lacks quipu/kernels"),
        (X86, WHOLE | {"quipu_llm.libs/libgomp-a34b3233.so.1.0.0"}, METADATA, "libgomp-a34b3233.so.1.0.0, which"),
        (X86.replace("0.2.0", "0.3.0"), WHOLE, METADATA, "metadata is of version 0.2.0"),
        (X86, WHOLE, METADATA.replace("License-File", "Other"), "no License-File"),
        (X86.replace("cp311-abi3", "cp312-cp312"), WHOLE, METADATA, "cp311-abi3"),
        ("quipu_llm-0.2.0-cp311-abi3-linux_x86_64.whl", WHOLE, METADATA, "auditwheel"),
        ("quipu_llm-0.2.0-py3-none-any.whl", set(), METADATA, "cp311-abi3"),
    ],
)
def test_faulty_wheels_are_found(name: str, members: set[str], metadata: str, fault: str) -> None:
    """A missing or additional library, a name that no index takes, and incomplete metadata are found."""
    (found,) = faults(name, members, metadata)
    assert fault in found
