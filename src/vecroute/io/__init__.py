"""Read tables and images from files, and write predictions to files."""
