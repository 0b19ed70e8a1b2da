"""What a program has looked at, and the checks in the prologue that it still is what it was."""
