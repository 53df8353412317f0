"""A lane: one channel from one rank to another, first in, first out."""
