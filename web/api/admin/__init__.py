"""What operators ask: health, metrics, settings, usage reports."""
