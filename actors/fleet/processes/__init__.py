"""Child processes of the web process: how they are started, watched and ended, and how processes log."""
