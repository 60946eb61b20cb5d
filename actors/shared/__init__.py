"""What more than one actor needs: block keys, seeds, token decoding, the checkpoint's JSON files."""
