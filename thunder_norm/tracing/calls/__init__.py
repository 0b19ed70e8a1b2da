"""Calls of a program that has been traced: what Thunder does in each of them, done in as little time as its guards take."""
