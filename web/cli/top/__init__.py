"""`quipu top`: what a running server does, in the terminal."""
