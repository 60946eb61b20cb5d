"""The transformers backend: decoders of the transformers library, through its attention interface, on our blocks."""
