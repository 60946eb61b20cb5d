"""What is known of the prefix cache: its use, its tree, what a larger one would find, explanations and advice."""
