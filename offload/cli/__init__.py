"""The commands: one module each, and what they share (arguments, targets, the terminal)."""
