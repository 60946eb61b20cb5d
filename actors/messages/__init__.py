"""Every message that actors exchange, one module for each receiver."""
