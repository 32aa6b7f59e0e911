"""Tables and images in and out of files."""
