"""What every layer above knows of one HTTP request: its context, its principal, its running usage, its errors."""
