"""What low precision does to a program: which numbers there are, how much each operation rounds, and how much of it arrives."""
