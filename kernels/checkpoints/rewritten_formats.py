"""The formats that `rewriting.py` writes, apart from it so that `quipu quantize --help` does not load torch."""

FORMATS = ("int8", "w8a8", "int4", "int4-g32", "int4-g128")
"""Values of `--format`: as `--quantization`; `w8a8` is int8 made for int8 activations."""
