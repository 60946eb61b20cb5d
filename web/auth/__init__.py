"""Authentication: keys, hosts, origins."""
