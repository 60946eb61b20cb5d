"""What is measured, and against whom; each module is a command. Not part of the installed package."""
