"""Following parameters through a program: which entries of which parameters an operation takes."""
