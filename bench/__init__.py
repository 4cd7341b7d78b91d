"""What lowbit measures about itself, installed as ``lowbit.bench``; the command is ``lowbit bench``."""
