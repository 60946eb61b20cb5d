"""From a checkpoint's files to tensors."""
