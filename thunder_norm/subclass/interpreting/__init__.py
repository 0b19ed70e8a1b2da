"""What Thunder's interpreter is told when a program meets a wrapper, or a plain tensor beside one."""
