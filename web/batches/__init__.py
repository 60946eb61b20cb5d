"""Files and batches of clients, and what runs the lines of batches."""
