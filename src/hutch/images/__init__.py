"""What a box is made of: its root file system, its Python packages, and our guest."""
