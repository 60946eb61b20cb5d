"""Low-rank adapters (LoRA) as PEFT saves them: their configuration, their matrices, and the products they change."""
