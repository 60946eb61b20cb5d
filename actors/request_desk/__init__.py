"""What the web layer holds of a request, and the desk at which it opens one."""
