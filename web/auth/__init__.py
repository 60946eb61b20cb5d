"""Who may ask: keys, hosts, origins."""
