"""In-place operations of programs that are differentiated or transformed: which memory they write into, and what stands for it then."""
