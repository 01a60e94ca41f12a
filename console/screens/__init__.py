"""The screens of the terminal UI, each with its layout beside it."""
